"""The batched sampler: rows are independent, and off means off."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mayfly_protocol.requests import Sampling
from mayfly_worker.engine.sampler import (
    RowMemory,
    Sampler,
    SequenceSampling,
    healthy,
    keys_at,
    stream_of,
)

WIDTH = 97


def logits(rows: int, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(0, 3, (rows, WIDTH)).astype(np.float32))


samplings = st.builds(
    Sampling,
    seed=st.integers(0, 2**63 - 1),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([0.01, 0.5, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 5, 1000]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, -0.5]),
    logit_bias=st.sampled_from([(), ((3, 5.0), (4, -100.0))]),
    typical_p=st.sampled_from([0.0, 0.5, 1.0]),
    top_n_sigma=st.sampled_from([0.0, 0.5, 2.0]),
    xtc_probability=st.sampled_from([0.0, 0.5, 1.0]),
    xtc_threshold=st.sampled_from([0.0, 0.1]),
    repetition_window=st.sampled_from([None, 0, 2]),
    frequency_window=st.sampled_from([None, 3]),
    allowed_ids=st.sampled_from([(), (), (5,), (5, 7, 11)]),
)
rows = st.builds(
    SequenceSampling,
    samplings,
    choice=st.integers(0, 3),
    banned=st.sampled_from([(), (1, 2)]),
    banned_until=st.integers(0, 4),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(rows, min_size=1, max_size=6),
    st.integers(0, 1000),
    st.sampled_from([mx.float32, mx.bfloat16, mx.float16]),
)
def test_a_row_draws_the_same_alone_and_in_any_batch(
    batch: list[SequenceSampling], seed: int, kind: mx.Dtype
) -> None:
    together, alone = Sampler(batch, WIDTH), [Sampler([row], WIDTH) for row in batch]
    for position in range(4):
        x = logits(len(batch), seed + position).astype(kind)
        drawn = together(x, [position] * len(batch)).tolist()
        solo = [s(x[i : i + 1], [position]).item() for i, s in enumerate(alone)]
        assert drawn == solo
        for row, token in zip(batch, drawn, strict=True):
            allowed = row.sampling.allowed_ids or range(WIDTH)
            assert token in allowed
            assert token not in row.banned or position >= row.banned_until


def test_the_callers_logits_are_left_alone() -> None:
    x = logits(2)
    before = np.array(x)
    row = SequenceSampling(
        Sampling(seed=1, temperature=0.5, top_k=3, repetition_penalty=1.5, logit_bias=((1, 9.0),)),
        banned=(4,),
        banned_until=9,
    )
    sampler = Sampler([row, row], WIDTH)
    for position in range(3):
        mx.eval(sampler(x, [position, position]))
    assert np.array_equal(np.array(x), before)


def test_draws_follow_the_softmax() -> None:
    x = mx.array([[0.0, 1.0, 2.0]])
    sampler = Sampler([SequenceSampling(Sampling(seed=7, temperature=1.0))], 3)
    drawn = [sampler(x, [p]).item() for p in range(6000)]
    expected = np.exp([0, 1, 2]) / np.exp([0, 1, 2]).sum()
    assert np.allclose(np.bincount(drawn, minlength=3) / 6000, expected, atol=0.02)


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({"top_k": 2}, {3, 4}),
        ({"top_p": 0.5}, {4}),
        ({"top_p": 0.7}, {3, 4}),
        ({"min_p": 0.5}, {4}),
        ({"min_p": 0.3}, {3, 4}),
        ({"top_k": 1, "top_p": 0.99}, {4}),
        ({"top_p": 0.0}, {4}),
        ({}, {0, 1, 2, 3, 4}),
    ],
)
def test_filters_keep_what_they_should(options: dict[str, float], allowed: set[int]) -> None:
    x = mx.array([[0.0, 1.0, 2.0, 3.0, 4.0]])  # 0.012, 0.032, 0.086, 0.234, 0.636
    sampler = Sampler([SequenceSampling(Sampling(seed=3, **options))], 5)  # type: ignore[arg-type]
    drawn = {sampler(x, [p]).item() for p in range(600)}
    assert drawn == allowed


def test_penalties_count_the_output() -> None:
    x = mx.array([[2.0, 1.9, 0.0]])
    plain = Sampling(seed=0, temperature=0.0)
    for options in (
        {"repetition_penalty": 2.0},
        {"presence_penalty": 1.0},
        {"frequency_penalty": 1.0},
    ):
        sampling = Sampling(seed=0, temperature=0.0, **options)  # type: ignore[arg-type]
        sampler = Sampler([SequenceSampling(sampling)], 3)
        assert [sampler(x, [p]).item() for p in range(2)] == [0, 1]
    sampler = Sampler([SequenceSampling(plain)], 3)
    assert [sampler(x, [p]).item() for p in range(2)] == [0, 0]


def test_counts_survive_a_rebuild() -> None:
    x = mx.array([[2.0, 1.9, 0.0]])
    row = SequenceSampling(Sampling(seed=0, temperature=0.0, presence_penalty=1.0))
    first = Sampler([row], 3)
    first(x, [0])
    other = SequenceSampling(Sampling(seed=0, temperature=0.0))
    second = Sampler([other, row], 3, [RowMemory(), first.memory_of(0)])
    assert second(mx.concatenate([x, x]), [0, 1]).tolist() == [0, 1]


def test_keys_differ_by_seed_choice_and_position() -> None:
    streams = np.array([stream_of(s, c) for s in range(20) for c in range(20)], dtype=np.uint64)
    keys = {tuple(k) for p in range(20) for k in keys_at(streams, [p] * 400).tolist()}
    assert len(keys) == 20 * 20 * 20


def test_unhealthy_rows_are_told_apart() -> None:
    nan, inf = math.nan, math.inf
    sick = mx.array([[1.0, nan, 2.0], [nan, nan, nan], [1, 1, 1], [-inf, -inf, -inf]])
    well = mx.array([[0.0, -inf, 1], [1, 2, 3], [-inf, inf, 0]])
    for kind in (mx.float32, mx.bfloat16, mx.float16):
        assert not any(healthy(sick.astype(kind)).tolist())
        assert all(healthy(well.astype(kind)).tolist())


def test_of_equals_the_first_is_taken_in_every_type() -> None:
    greedy, hot = SequenceSampling.greedy(), SequenceSampling(Sampling(seed=0, temperature=1.0))
    for kind in (mx.float32, mx.bfloat16, mx.float16):
        x = mx.array(np.random.default_rng(0).integers(0, 3, (64, WIDTH))).astype(kind)
        first = np.array(x.astype(mx.float32)).argmax(axis=-1).tolist()
        assert Sampler([greedy] * 64, WIDTH)(x, [0] * 64).tolist() == first
        mixed = Sampler([greedy] * 64 + [hot], WIDTH)
        assert mixed(mx.concatenate([x, x[:1]]), [0] * 65).tolist()[:64] == first
