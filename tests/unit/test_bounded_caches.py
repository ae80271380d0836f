"""Batches of bounded and of quantized KV caches, compared with mlx-lm's caches of single sequences.

mlx-lm's bounded cache is fed one token at a time: in chunks its mask hides the kept tokens, so that
its results depend on the sizes of chunks.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models.cache import QuantizedKVCache, RotatingKVCache

from mayfly_worker.engine.bounded_caches import (
    KEPT,
    BatchBoundedKVCache,
    BoundedKVCache,
    GroupedKVCache,
    group_size,
)

MAX_SIZE = 16
HEADS, WIDTH = 2, 4


def tokens(row: int, start: int, count: int, padding: int = 0) -> mx.array:
    """Keys of a row's tokens, shape [1, HEADS, count + padding, WIDTH], which tell row and position
    of each token; -1 for padding."""
    numbers = [row * 1000 + start + i for i in range(count)] + [-1] * padding
    return mx.broadcast_to(
        mx.array(numbers, dtype=mx.float32)[None, None, :, None],
        (1, HEADS, len(numbers), WIDTH),
    )


class Sequence:
    """A sequence with mlx-lm's bounded cache, which is fed one token at a time."""

    def __init__(self, row: int) -> None:
        self.row = row
        self.cache = RotatingKVCache(MAX_SIZE, keep=KEPT)

    def feed(self, count: int) -> list[set[float]]:
        """Returns the tokens to which each of the next ``count`` tokens attends."""
        seen = []
        for _ in range(count):
            new = tokens(self.row, self.cache.offset, 1)
            assert self.cache.make_mask(1) is None
            keys, _ = self.cache.update_and_fetch(new, -new)
            seen.append(set(keys[0, 0, :, 0].tolist()))
        return seen


def attended(cache: Any, new: mx.array) -> list[list[set[float]]]:
    """Feeds new tokens to a cache, and returns the tokens to which each of them attends, by row."""
    count = new.shape[2]
    mask = cache.make_mask(count)
    keys, values = cache.update_and_fetch(new, -new)
    assert mx.array_equal(keys, -values)
    rows, columns = keys.shape[0], keys.shape[2]
    if mask is None:
        mask = mx.ones((1, columns), mx.bool_)
    if isinstance(mask, str):
        mask = mx.arange(columns)[None] <= mx.arange(columns - count, columns)[:, None]
    shown = np.array(mx.broadcast_to(mask, (rows, 1, count, columns)))[:, 0]
    numbers = np.array(keys)[:, 0, :, 0]
    return [[set(numbers[r][shown[r, i]].tolist()) for i in range(count)] for r in range(rows)]


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_M06_a_batch_of_bounded_caches_is_mlx_lm_s_of_each_sequence(data: st.DataObject) -> None:
    batch = BoundedKVCache.merge([BoundedKVCache(MAX_SIZE)])
    running = [Sequence(0)]
    names = iter(range(1, 1000))
    for _ in range(data.draw(st.integers(1, 12))):
        match data.draw(
            st.sampled_from(["step", "step", "chunk", "ragged", "join", "leave", "cut"])
        ):
            case "step" | "chunk" as kind:
                count = 1 if kind == "step" else data.draw(st.integers(2, 30))
                new = [tokens(s.row, s.cache.offset, count) for s in running]
                got = attended(batch, mx.concatenate(new))
                assert got == [s.feed(count) for s in running]
            case "ragged":
                counts = [data.draw(st.integers(1, 30)) for _ in running]
                padding = [max(counts) - n for n in counts]
                new = [
                    tokens(s.row, s.cache.offset, n, p)
                    for s, n, p in zip(running, counts, padding, strict=True)
                ]
                batch.prepare(lengths=counts, right_padding=padding)
                got = attended(batch, mx.concatenate(new))
                batch.finalize()
                for row, s, n in zip(got, running, counts, strict=True):
                    assert row[:n] == s.feed(n)
            case "join":
                alone = [Sequence(next(names)) for _ in range(data.draw(st.integers(1, 3)))]
                caches = [BoundedKVCache(MAX_SIZE) for _ in alone]
                for s, cache in zip(alone, caches, strict=True):
                    for count in data.draw(st.lists(st.integers(1, 30), max_size=3)):
                        got = attended(cache, tokens(s.row, s.cache.offset, count))
                        assert got == [s.feed(count)]
                batch.extend(BoundedKVCache.merge(caches))
                running += alone
            case "leave" if len(running) > 1:
                stay = data.draw(
                    st.lists(st.integers(0, len(running) - 1), min_size=1, unique=True)
                )
                batch.filter(stay)
                running = [running[i] for i in stay]
            case "cut":
                taken = [batch.extract(i) for i in range(len(running))]
                for cache, s in zip(taken, running, strict=True):
                    if s.cache.offset and s.cache.is_trimmable():
                        assert cache.is_trimmable()
                        count = data.draw(st.integers(0, s.cache.offset - 1))
                        cache.trim(count)
                        s.cache.trim(count)
                batch = BoundedKVCache.merge(taken)
    assert batch.offset.tolist() == [s.cache.offset for s in running]


def test_M06_a_bounded_cache_takes_no_more_memory_than_its_bound() -> None:
    batch = BoundedKVCache.merge([BoundedKVCache(300), BoundedKVCache(300)])
    for count in (700, 1, 5):
        new = mx.zeros((2, HEADS, count, WIDTH))
        batch.update_and_fetch(new, new)
        assert [a.shape for a in batch.state] == [(2, HEADS, 300, WIDTH)] * 2


def test_M06_layers_with_windows_of_their_own_are_refused() -> None:
    for cache in (BoundedKVCache(MAX_SIZE), BatchBoundedKVCache(2, MAX_SIZE)):
        with pytest.raises(NotImplementedError, match="a window of their own"):
            cache.make_mask(3, window_size=8)


@settings(deadline=None, max_examples=60)
@given(
    bits=st.sampled_from([2, 3, 4, 5, 6, 8]),
    widths=st.sampled_from([(32, 64), (96, 96), (64, 128)]),
    data=st.data(),
)
def test_M11_a_batch_of_quantized_caches_is_each_sequence_s(
    bits: int, widths: tuple[int, int], data: st.DataObject
) -> None:
    lengths = data.draw(st.lists(st.lists(st.integers(1, 300), max_size=2), min_size=1, max_size=3))
    rng = np.random.default_rng(len(lengths))

    def drawn(rows: int, count: int) -> tuple[mx.array, mx.array]:
        shapes = [(rows, HEADS, count, width) for width in widths]
        keys, values = (mx.array(rng.normal(size=s), dtype=mx.float32) for s in shapes)
        return keys, values

    caches = [GroupedKVCache(bits) for _ in lengths]
    fed: list[list[tuple[mx.array, mx.array]]] = [[] for _ in lengths]
    for cache, own, counts in zip(caches, fed, lengths, strict=True):
        for count in counts:
            own.append(drawn(1, count))
            cache.update_and_fetch(*own[-1])
    batch = GroupedKVCache.merge(caches)
    for counts in data.draw(
        st.lists(st.lists(st.integers(1, 9), min_size=3, max_size=3), max_size=3)
    ):
        counts = counts[: len(lengths)]
        keys, values = drawn(len(lengths), max(counts))
        batch.prepare(lengths=counts, right_padding=[max(counts) - n for n in counts])
        batch.update_and_fetch(keys, values)
        batch.finalize()
        for i, (own, n) in enumerate(zip(fed, counts, strict=True)):
            own.append((keys[i : i + 1, :, :n], values[i : i + 1, :, :n]))
    for i, own in enumerate(fed):
        taken = batch.extract(i)
        assert taken.offset == sum(keys.shape[2] for keys, _ in own)
        if not own:
            assert taken.empty()
            continue
        for side, got in enumerate((taken.keys, taken.values)):
            whole = mx.concatenate([pair[side] for pair in own], axis=2)
            wanted = mx.quantize(whole, group_size=taken.group_size, bits=bits)
            assert all(mx.array_equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_M11_a_quantized_cache_holds_what_mlx_lm_s_does() -> None:
    ours, theirs = GroupedKVCache(8), QuantizedKVCache(group_size=64, bits=8)
    for count in (300, 1, 20):
        new = mx.random.normal((1, HEADS, count, 128), key=mx.random.key(count))
        pairs = zip(
            tree_flatten(ours.update_and_fetch(new, new)),
            tree_flatten(theirs.update_and_fetch(new, new)),
            strict=True,
        )
        assert all(mx.array_equal(a, b) for (_, a), (_, b) in pairs)


@pytest.mark.parametrize(
    ("widths", "wanted", "size"),
    [((128, 128), 0, 64), ((96, 96), 0, 32), ((192, 128), 0, 64), ((128, 128), 128, 128)],
)
def test_M11_the_size_of_groups_divides_the_heads(
    widths: tuple[int, int], wanted: int, size: int
) -> None:
    keys, values = (mx.zeros((1, 1, 1, width)) for width in widths)
    assert group_size(keys, values, wanted) == size


@pytest.mark.parametrize(
    ("width", "wanted", "because"),
    [(80, 0, "a width of 80, which no size of groups divides"), (96, 64, "groups of 64 do not")],
)
def test_M11_heads_that_no_groups_divide_are_refused(width: int, wanted: int, because: str) -> None:
    keys = mx.zeros((1, 1, 1, width))
    with pytest.raises(ValueError, match=because):
        group_size(keys, keys, wanted)
