"""Sizing prefill chunks by the time that those before them took."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mayfly_worker.engine.chunks import FIRST, LARGEST, MOST, SMALLEST, ChunkSizer, bucket

ALONE_S, SHARED_S = 1.0, 0.25

rates = st.floats(1e-6, 1e-2)
"""Seconds a token."""
lengths = st.integers(SMALLEST, 5000)


def sizer() -> ChunkSizer:
    return ChunkSizer(ALONE_S, SHARED_S)


@given(rates, lengths, st.integers(1, 64), st.booleans())
def test_a_chunk_has_the_time_that_it_is_given(
    rate: float, tokens: int, rows: int, decoding: bool
) -> None:
    chunks = sizer()
    chunks.measured(tokens, tokens * rate)
    size = chunks.size(decoding=decoding, rows=rows)
    target = SHARED_S if decoding else ALONE_S
    assert size & (size - 1) == 0
    assert SMALLEST <= size <= LARGEST
    assert size == SMALLEST or size * rows * rate <= target * 1.001
    assert size == SMALLEST or size * rows <= MOST
    small = 2 * size * rows > MOST or 2 * size * rows * rate > target * 0.98 - rows * rate
    assert size == LARGEST or small


@given(rates, st.integers(1, 64), st.integers(1, 2 * MOST))
def test_M10_a_chunk_has_the_memory_that_it_is_given(rate: float, rows: int, room: int) -> None:
    chunks = sizer()
    chunks.measured(1000, 1000 * rate)
    free = chunks.size(decoding=False, rows=rows)
    size = chunks.size(decoding=False, rows=rows, at_most=room)
    assert size in (SMALLEST, free) or size * rows <= room < 2 * size * rows
    assert size <= free


@given(rates, st.lists(st.tuples(lengths, st.floats(1.0, 1e3)), min_size=1))
def test_planning_new_shapes_makes_no_chunk_smaller(
    rate: float, planned: list[tuple[int, float]]
) -> None:
    chunks = sizer()
    chunks.measured(1000, 1000 * rate)
    before = chunks.tokens(decoding=True)
    for tokens, slower in planned:
        chunks.measured(tokens, tokens * rate * slower, planned=True)
    assert chunks.tokens(decoding=True) == before


@given(rates, st.floats(1.1, 1e3), lengths)
def test_a_shape_seen_before_that_is_slower_is_believed_at_once(
    rate: float, slower: float, tokens: int
) -> None:
    chunks = sizer()
    chunks.measured(1000, 1000 * rate)
    chunks.measured(tokens, tokens * rate * slower)
    room = chunks.tokens(decoding=True)
    assert room == SMALLEST or room * rate * slower <= SHARED_S * 1.001


@given(rates, st.floats(1.1, 1e3), lengths)
def test_a_new_shape_that_is_faster_even_so_is_believed(
    rate: float, faster: float, tokens: int
) -> None:
    chunks, planned = sizer(), sizer()
    for each in (chunks, planned):
        each.measured(1000, 1000 * rate)
    chunks.measured(tokens, tokens * rate / faster)
    planned.measured(tokens, tokens * rate / faster, planned=True)
    assert planned.tokens(decoding=True) == chunks.tokens(decoding=True)


def test_nothing_is_known_before_a_shape_comes_again() -> None:
    chunks = sizer()
    chunks.measured(FIRST, 2.0, planned=True)
    assert chunks.tokens(decoding=True) == FIRST
    chunks.measured(FIRST, FIRST * 1e-4)
    assert chunks.tokens(decoding=True) == 2500


@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 100, 128, 129, 150, 257, 1000, 5000])
def test_buckets_are_few_and_near(tokens: int) -> None:
    assert tokens <= bucket(tokens) <= max(1.25 * tokens, tokens + SMALLEST)
    assert bucket(bucket(tokens)) == bucket(tokens)
