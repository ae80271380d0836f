"""The prefix cache on layers whose contents are the token ids, so that a hit can be read."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from mayfly_worker.prefix_cache import PrefixCache, PrefixHit

Tokens = list[int]
WINDOW = 6


@pytest.fixture(autouse=True)
def _on_cpu() -> Iterator[None]:
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)


def entries(tokens: Tokens) -> mx.array:
    return mx.array(tokens, dtype=mx.int32).reshape(1, 1, -1, 1)


def fed(layer: Any, tokens: Tokens) -> Any:
    layer.update_and_fetch(entries(tokens), entries(tokens) + 1000)
    return layer


def full(tokens: Tokens) -> Any:
    return fed(KVCache(), tokens)


def window(tokens: Tokens) -> Any:
    return fed(RotatingKVCache(max_size=WINDOW), tokens)


def recurrent(tokens: Tokens) -> Any:
    layer = ArraysCache(size=2)
    layer[0] = mx.array([tokens])
    layer[1] = mx.array([sum(tokens)])
    return layer


def held(layer: Any) -> Tokens:
    """The token ids in a layer's cache, oldest first; its values must agree with its keys."""
    if isinstance(layer, ArraysCache):
        tokens = layer[0].flatten().tolist()
        assert layer[1].item() == sum(tokens)
        return tokens
    keys, values = layer.keys, layer.values
    if isinstance(layer, RotatingKVCache):
        keys, values = layer._temporal_order(keys), layer._temporal_order(values)
    else:
        keys, values = layer.keys_and_values()
    assert (values - keys == 1000).all().item()
    return keys.flatten().tolist()


def found(cache: PrefixCache, tokens: Tokens, at_most: int | None = None) -> PrefixHit:
    hit = cache.lookup(tokens, len(tokens) if at_most is None else at_most)
    assert hit is not None
    return hit


def run(start: int, length: int) -> Tokens:
    return list(range(start, start + length))


# What hits


def test_a_trimmable_entry_serves_every_prefix_of_itself() -> None:
    cache = PrefixCache(1 << 20, min_length=4)
    cache.insert(run(0, 20), [full(run(0, 20)), None])
    for query, length in [
        (run(0, 30), 20),
        (run(0, 20), 20),
        (run(0, 9), 9),
        ([*run(0, 13), 99, 98], 13),
    ]:
        hit = found(cache, query)
        assert (hit.length, held(hit.caches[0]), hit.caches[1]) == (length, query[:length], None)
        assert hit.caches[0].offset == length
    assert found(cache, run(0, 20), at_most=19).length == 19


def test_nothing_hits_below_the_least_useful_length() -> None:
    cache = PrefixCache(1 << 20, min_length=16)
    cache.insert(run(0, 15), [full(run(0, 15))])
    assert len(cache) == 0
    cache.insert(run(0, 40), [full(run(0, 40))])
    assert cache.lookup(run(0, 16), 15) is None
    assert cache.lookup([*run(0, 15), 99, 98], 16) is None
    assert found(cache, run(0, 17), 16).length == 16
    assert cache.lookup(run(0, 40), 0) is None
    assert cache.lookup([], -1) is None
    assert (cache.stats.hits, cache.stats.misses, cache.stats.hit_tokens) == (1, 4, 16)


def test_a_fixed_entry_hits_at_its_own_end_alone() -> None:
    cache = PrefixCache(1 << 20, min_length=4)
    cache.insert(run(0, 10), [full(run(0, 10)), recurrent(run(0, 10))], kind="system")
    cache.insert(run(0, 20), [full(run(0, 20)), recurrent(run(0, 20))], kind="prompt")
    assert len(cache) == 2
    for query, at_most, length, kind in [
        (run(0, 30), 29, 20, "prompt"),
        (run(0, 20), 19, 10, "system"),
        ([*run(0, 15), 99], 15, 10, "system"),
    ]:
        hit = found(cache, query, at_most)
        assert (hit.length, hit.kind) == (length, kind)
        assert [held(layer) for layer in hit.caches] == [query[:length]] * 2
    assert cache.lookup(run(0, 10), 9) is None


def test_a_window_can_be_trimmed_until_it_has_wrapped() -> None:
    cache = PrefixCache(1 << 20, min_length=2)
    cache.insert(run(0, WINDOW - 1), [window(run(0, WINDOW - 1))])
    hit = found(cache, [0, 1, 2, 99])
    assert (hit.length, held(hit.caches[0])) == (3, [0, 1, 2])
    assert fed(hit.caches[0], [7]).offset == 4
    assert held(hit.caches[0]) == [0, 1, 2, 7]

    cache.insert(run(0, 12), [window(run(0, 12))])
    assert len(cache) == 2, "the wrapped entry does not stand in for the shorter one"
    assert found(cache, run(0, 11)).length == WINDOW - 1
    assert found(cache, run(0, 13)).length == 12


def test_a_cache_list_is_trimmed_in_all_its_parts_or_not_at_all() -> None:
    cache = PrefixCache(1 << 20, min_length=2)
    cache.insert(run(0, 9), [CacheList(full(run(0, 9)), CacheList(full(run(0, 9)))), None])
    both = found(cache, [0, 1, 2, 3, 99]).caches[0]
    assert held(both[0]) == held(both[1][0]) == [0, 1, 2, 3]

    cache.insert(run(50, 9), [CacheList(recurrent(run(50, 9)), full(run(50, 9)))])
    assert cache.lookup(run(50, 8), 8) is None
    assert [held(c) for c in found(cache, run(50, 12)).caches[0].caches] == [run(50, 9)] * 2


def test_a_layer_that_was_never_used_does_no_harm() -> None:
    cache = PrefixCache(1 << 20, min_length=2)
    cache.insert(run(0, 9), [full(run(0, 9)), KVCache(), RotatingKVCache(max_size=4)])
    hit = found(cache, run(0, 5))
    assert hit.length == 5
    assert hit.caches[1].empty()
    assert hit.caches[2].empty()


def test_concatenating_caches_append_after_what_was_kept() -> None:
    cache = PrefixCache(1 << 20, min_length=2)
    cache.insert(run(0, 9), [fed(ConcatenateKVCache(), run(0, 9))])
    layer = found(cache, [0, 1, 2, 99]).caches[0]
    assert held(fed(layer, [99])) == [0, 1, 2, 99]


def test_chunked_caches_are_trimmed_only_while_they_dropped_nothing() -> None:
    cache = PrefixCache(1 << 20, min_length=2)
    cache.insert(run(0, 8), [fed(ChunkedKVCache(8), run(0, 8))])
    assert held(found(cache, run(0, 5)).caches[0]) == run(0, 5)

    layer = fed(ChunkedKVCache(8), run(50, 12))
    layer.maybe_trim_front()
    cache.insert(run(50, 12), [layer])
    assert cache.lookup(run(50, 11), 11) is None
    hit = found(cache, run(50, 14))
    assert (hit.length, held(hit.caches[0])) == (12, run(54, 8))


def test_quantized_caches_are_trimmed_to_what_the_shorter_prompt_quantizes_to() -> None:
    def quantized(length: int) -> Any:
        layer = QuantizedKVCache(group_size=32, bits=8)
        rows = mx.arange(40 * 64, dtype=mx.float32).reshape(1, 1, 40, 64)[:, :, :length]
        layer.update_and_fetch(mx.sin(rows), mx.cos(rows))
        return layer

    cache = PrefixCache(1 << 20, min_length=2)
    cache.insert(run(0, 40), [quantized(40)])
    layer = found(cache, run(0, 17)).caches[0]
    short = quantized(17)
    for mine, its in zip(layer.keys_and_values(), short.keys_and_values(), strict=True):
        assert all((a == b).all().item() for a, b in zip(mine, its, strict=True))
    assert cache.nbytes == 40 * 2 * (64 + 2 * 2 * 4)


def test_caches_of_classes_it_does_not_know_are_kept_whole() -> None:
    class Unknown:
        def __init__(self, tokens: Tokens) -> None:
            self.rows = {"window": mx.array(tokens)}
            self.offset = len(tokens)

        def is_trimmable(self) -> bool:
            return True

    cache = PrefixCache(1 << 20, min_length=2)
    cache.insert(run(0, 9), [Unknown(run(0, 9))])
    assert cache.lookup(run(0, 8), 8) is None
    assert found(cache, run(0, 10)).caches[0].rows["window"].tolist() == run(0, 9)
    assert cache.nbytes == 36


# What is stored


def test_a_longer_sequence_replaces_its_prefixes_and_a_shorter_one_refreshes_it() -> None:
    cache = PrefixCache(1 << 20, min_length=2)
    for length in (4, 8, 12):
        cache.insert(run(0, length), [full(run(0, length))])
    assert len(cache) == 1
    assert cache.nbytes == 12 * 2 * 4
    cache.insert(run(50, 12), [full(run(50, 12))])
    cache.insert(run(0, 6), [full(run(0, 6))])
    assert len(cache) == 2
    cache.evict_to(100)
    assert found(cache, run(0, 12)).length == 12, "inserting a prefix made it the latest used"
    assert cache.lookup(run(50, 12), 12) is None


def test_the_same_fixed_boundary_is_stored_once() -> None:
    cache = PrefixCache(1 << 20, min_length=2)
    for _ in range(3):
        cache.insert(run(0, 9), [recurrent(run(0, 9))])
    assert len(cache) == 1


def test_the_least_recently_used_entry_goes_first_and_a_hit_is_a_use() -> None:
    each = 10 * 2 * 4
    cache = PrefixCache(3 * each, min_length=2)
    for start in (100, 200, 300):
        cache.insert(run(start, 10), [full(run(start, 10))])
    found(cache, run(100, 10))
    cache.insert(run(400, 10), [full(run(400, 10))])
    assert cache.lookup(run(200, 10), 10) is None
    assert [found(cache, run(s, 10)).length for s in (100, 300, 400)] == [10, 10, 10]
    assert (cache.nbytes, len(cache), cache.stats.evictions) == (3 * each, 3, 1)


def test_an_entry_larger_than_the_cache_is_refused_and_nothing_is_lost_for_it() -> None:
    cache = PrefixCache(100, min_length=2)
    cache.insert(run(0, 10), [full(run(0, 10))])
    cache.insert(run(0, 20), [full(run(0, 20))])
    assert (cache.stats.refused, cache.stats.evictions, len(cache)) == (1, 0, 1)
    assert found(cache, run(0, 20)).length == 10


def test_clearing_leaves_nothing_and_keeps_the_counts() -> None:
    cache = PrefixCache(1 << 20, min_length=2)
    cache.insert(run(0, 10), [full(run(0, 10))])
    cache.insert(run(0, 9), [recurrent(run(0, 9))])
    found(cache, run(0, 10))
    cache.clear()
    assert (len(cache), cache.nbytes, cache.stats.hits, cache.stats.evictions) == (0, 0, 1, 0)
    assert cache.lookup(run(0, 10), 10) is None


@pytest.mark.parametrize(
    ("caches", "message"),
    [
        (lambda: [None, full(run(0, 8))], "layer 1 .KVCache. holds 8 tokens, not the 9"),
        (lambda: [CacheList(full(run(0, 9)), full(run(0, 10)))], "layer 0 .KVCache. holds 10"),
        (lambda: [KVCache(), None], "empty"),
    ],
)
def test_caches_that_do_not_hold_the_tokens_are_refused(
    caches: Callable[[], list[Any]], message: str
) -> None:
    cache = PrefixCache(1 << 20, min_length=2)
    with pytest.raises(ValueError, match=message):
        cache.insert(run(0, 9), caches())
    assert (len(cache), cache.nbytes) == (0, 0)


def test_its_own_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="max_bytes"):
        PrefixCache(-1)
    with pytest.raises(ValueError, match="min_length"):
        PrefixCache(1, min_length=0)


# Whose memory it is


@pytest.mark.parametrize("make", [full, window, recurrent])
def test_two_hits_and_the_entry_share_no_state(make: Callable[[Tokens], Any]) -> None:
    given_away = make(run(0, 9))
    cache = PrefixCache(1 << 20, min_length=2)
    cache.insert(run(0, 9), [CacheList(given_away)])
    expected = held(found(cache, run(0, 9)).caches[0][0])

    first, second = (found(cache, run(0, 9)).caches[0][0] for _ in range(2))
    for layer in (given_away, first):
        if isinstance(layer, ArraysCache):
            layer[0][:, 2] = 77
            layer[1] = layer[1] * 0
        else:
            fed(layer, [77])
            fed(layer, [78])
            layer.keys[..., 1:3, :] = 77
    assert held(second) == expected
    assert held(found(cache, run(0, 9)).caches[0][0]) == expected


def test_an_entry_keeps_neither_its_batch_nor_its_graph_alive() -> None:
    rows, length, width = 16, 64, 512

    def batch() -> tuple[Any, Any]:
        attention = BatchKVCache([0] * rows)
        wide = mx.random.normal((rows, 4, length, width // 4))
        attention.update_and_fetch(wide, wide * 2)
        state = ArraysCache(size=1)
        state[0] = mx.random.normal((rows, 64, width))
        mx.eval(attention.state, state.state)
        return attention, state

    gc.collect()
    mx.synchronize()
    before = mx.get_active_memory()
    cache = PrefixCache(1 << 30)
    attention, state = batch()
    own = [attention.extract(3), state.extract(3)]
    own[0].values = own[0].values + 1  # not evaluated yet
    cache.insert(run(0, length), own)
    assert cache.nbytes == 3 * length * width * 4
    del attention, state, own
    gc.collect()
    mx.synchronize()
    kept = mx.get_active_memory() - before
    assert abs(kept - cache.nbytes) <= 3 * 16384, "parts of pages, or scalars of other tests"


def test_an_entry_has_no_room_to_grow() -> None:
    cache = PrefixCache(1 << 20, min_length=2)
    layer = full(run(0, 10))
    assert layer.keys.shape[2] == 256
    cache.insert(run(0, 10), [layer])
    assert cache.nbytes == 10 * 2 * 4
    cache.insert(run(100, 50), [window(run(100, 50))])
    assert cache.nbytes == (10 + WINDOW) * 2 * 4


# Everything at once

tokens = st.lists(st.integers(0, 1), min_size=1, max_size=12)
makes = st.sampled_from([full, window, recurrent])
uses = st.lists(st.tuples(tokens, st.one_of(st.none(), makes)), max_size=25)


def best(stored: list[tuple[Tokens, Any]], query: Tokens) -> int:
    """The longest hit that a search of all stored sequences finds."""
    lengths = [0]
    for sequence, make in stored:
        differ = (i for i, (a, b) in enumerate(zip(sequence, query, strict=False)) if a != b)
        common = next(differ, min(len(sequence), len(query)))
        fixed = make is recurrent or (make is window and len(sequence) >= WINDOW)
        if not fixed or common == len(sequence):
            lengths.append(common)
    return max(lengths)


@settings(deadline=None, max_examples=60)
@given(uses, st.sampled_from([1 << 20, 200]))
def test_a_hit_holds_the_query_and_is_the_longest_there_is(
    steps: list[tuple[Tokens, Any]], max_bytes: int
) -> None:
    cache = PrefixCache(max_bytes, min_length=1)
    stored: list[tuple[Tokens, Any]] = []
    for sequence, make in steps:
        if make is not None:
            cache.insert(sequence, [make(sequence)])
            stored.append((sequence, make))
        else:
            hit = cache.lookup(sequence, len(sequence) - 1)
            longest = best(stored, sequence[:-1])
            length = hit.length if hit else 0
            assert length == longest if max_bytes > 200 else length <= longest
            if hit:
                (layer,) = hit.caches
                kept = WINDOW if isinstance(layer, RotatingKVCache) else length
                assert held(layer) == sequence[:length][-kept:]
        assert cache.nbytes <= max_bytes
    cache.evict_to(0)
    assert (len(cache), cache.nbytes) == (0, 0)
