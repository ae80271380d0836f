"""The radix tree against a dictionary of sequences, and its cost."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mayfly_worker.prefix_cache.radix import Node, RadixTree, as_tokens

Sequence = tuple[int, ...]

# Few tokens and short sequences, so that edges split and fuse all the time.
sequences = st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple)
queries = st.lists(st.integers(0, 2), max_size=9).map(tuple)
operations = st.lists(st.tuples(st.sampled_from(["insert", "remove"]), sequences), max_size=30)


def shared(a: Sequence, b: Sequence) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(map(len, (a, b)))
    )


def assert_well_formed(tree: RadixTree[Sequence]) -> None:
    stack = [tree._root]
    nodes = 0
    while stack:
        node = stack.pop()
        nodes += 1
        for first, child in node.children.items():
            assert child.parent is node
            assert len(child.edge) > 0
            assert int(child.edge[0]) == first
            assert child.edge.base is None, "an edge keeps a longer array alive"
            assert child.length == node.length + len(child.edge)
            assert child.value is not None or len(child.children) >= 2
            stack.append(child)
    assert nodes <= 2 * len(tree) + 1


@settings(deadline=None)
@given(operations, st.lists(queries, min_size=1, max_size=5))
def test_it_finds_what_a_search_of_all_sequences_finds(
    steps: list[tuple[str, Sequence]], asked: list[Sequence]
) -> None:
    tree: RadixTree[Sequence] = RadixTree()
    stored: dict[Sequence, Node[Sequence]] = {}
    for step, sequence in steps:
        if step == "insert":
            node = tree.insert(as_tokens(sequence), sequence)
            assert stored.setdefault(sequence, node) is node
        elif sequence in stored:
            tree.remove(stored.pop(sequence))
        assert len(tree) == len(stored)
        assert_well_formed(tree)
        assert all(node.value == s and node.length == len(s) for s, node in stored.items())

    for query in [*asked, *stored]:
        match = tree.match(as_tokens(query))
        assert match.common == max((shared(query, s) for s in stored), default=0)
        assert [node.value for node in match.prefixes] == sorted(
            (s for s in stored if s == query[: len(s)]), key=len
        )
        if match.common == 0:
            assert match.nearest is None
        else:
            assert match.nearest is not None
            assert match.nearest.value in stored
            assert shared(query, match.nearest.value) == match.common


def test_a_second_value_replaces_the_first() -> None:
    tree: RadixTree[str] = RadixTree()
    node = tree.insert(as_tokens([1, 2]), "old")
    assert tree.insert(as_tokens([1, 2]), "new") is node
    assert (node.value, len(tree)) == ("new", 1)


def test_the_empty_sequence_and_a_removed_one_are_refused() -> None:
    tree: RadixTree[str] = RadixTree()
    with pytest.raises(ValueError, match="empty"):
        tree.insert(as_tokens([]), "x")
    node = tree.insert(as_tokens([1, 2]), "x")
    tree.remove(node)
    with pytest.raises(KeyError):
        tree.remove(node)


def test_ids_beyond_32_bits_are_refused() -> None:
    with pytest.raises(OverflowError):
        as_tokens([2**31])


def fastest_ms(call: Callable[[], object], runs: int = 15) -> float:
    times = []
    for _ in range(runs):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times) * 1e3


def conversations(count: int, length: int) -> list[np.ndarray]:
    """Sequences that each go on from some point of an earlier one."""
    rng = np.random.default_rng(0)
    made = [rng.integers(0, 150_000, length, dtype=np.int32)]
    while len(made) < count:
        parent = made[rng.integers(len(made))]
        at = int(rng.integers(length))
        fresh = rng.integers(0, 150_000, length - at, dtype=np.int32)
        made.append(np.concatenate([parent[:at], fresh]))
    return made


def test_a_long_query_against_many_sequences_takes_milliseconds() -> None:
    tree: RadixTree[int] = RadixTree()
    stored = conversations(200, 100_000)
    for i, sequence in enumerate(stored):
        tree.insert(sequence, i)
    for query in (stored[-1].tolist(), [*stored[0].tolist()[:-1], -1], stored[7].tolist()[:50_000]):
        took = fastest_ms(lambda query=query: tree.match(as_tokens(query)))
        print(f"{len(query)} tokens against {len(tree)} sequences: {took:.2f} ms")
        assert took < 20, "about 3 ms are usual, nearly all of it to make the list an array"


def test_a_chain_of_prefixes_is_matched_in_linear_time() -> None:
    # The worst shape: a node every few tokens along the query, each with its own short edge.
    tree: RadixTree[int] = RadixTree()
    whole = np.arange(100_000, dtype=np.int32)
    for end in range(500, 100_001, 500):
        tree.insert(whole[:end], end)
    match = tree.match(whole)
    assert [node.value for node in match.prefixes] == list(range(500, 100_001, 500))
    assert fastest_ms(lambda: tree.match(whole)) < 20
