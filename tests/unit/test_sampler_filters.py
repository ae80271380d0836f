"""Filters, penalties over windows and XTC, beside plain references and mlx-lm's own."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.sample_utils import apply_xtc, make_logits_processors
from numpy.typing import NDArray

from mayfly_protocol.requests import Sampling
from mayfly_worker.engine.filters import Filters, Xtc
from mayfly_worker.engine.sampler import RowMemory, Sampler, SequenceSampling

WIDTH = 61
Row = NDArray[np.float32]


def row_of(seed: int, spread: float = 2.0) -> Row:
    drawn: Row = np.random.default_rng(seed).normal(0, spread, WIDTH).astype(np.float32)
    return drawn


def kept(**options: Any) -> Any:
    """Ids that the filters leave of a row."""

    def of(row: Row) -> set[int]:
        filters = Filters([(0, Sampling(seed=0, **options))], 1, WIDTH)
        return set(np.flatnonzero(np.array(filters(mx.array(row[None])))[0] > -np.inf).tolist())

    return of


def softmax(row: Row) -> NDArray[np.float64]:
    powers = np.exp(row.astype(np.float64) - row.max())
    total: NDArray[np.float64] = powers / powers.sum()
    return total


def typical_ids(row: Row, share: float) -> set[int]:
    """The tokens of a locally typical set, one by one from the one nearest to the entropy."""
    p = softmax(row)
    some = [i for i in range(len(row)) if p[i] > 0]
    entropy = -sum(p[i] * math.log(p[i]) for i in some)
    found, total = set(), 0.0
    for i in sorted(some, key=lambda i: abs(-math.log(p[i]) - entropy)):
        if total >= share:
            break
        found.add(i)
        total += p[i]
    return found


@settings(deadline=None, max_examples=80)
@given(st.integers(0, 10**6), st.sampled_from([0.05, 0.2, 0.5, 0.9, 0.99]))
def test_typical_keeps_the_locally_typical_set(seed: int, share: float) -> None:
    row = row_of(seed)
    assert kept(typical_p=share)(row) == typical_ids(row, share)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10**6), st.sampled_from([0.3, 1.0, 2.0, 50.0]))
def test_top_n_sigma_keeps_what_is_near_the_best(seed: int, sigmas: float) -> None:
    row = row_of(seed)
    bound = row.max() - sigmas * row.astype(np.float64).std()
    assert kept(top_n_sigma=sigmas)(row) == set(np.flatnonzero(row >= bound).tolist())


def test_top_n_sigma_counts_only_what_can_be_sampled() -> None:
    row = np.full(WIDTH, -np.inf, dtype=np.float32)
    row[[3, 4, 5]] = [1.0, 1.1, 5.0]
    assert kept(top_n_sigma=1.0)(row) == {5}
    row[[3, 4]] = -np.inf
    assert kept(top_n_sigma=1.0)(row) == {5}
    both = Filters(
        [(0, Sampling(seed=0, top_k=2)), (1, Sampling(seed=0, top_n_sigma=1.0))], 2, WIDTH
    )
    assert np.array(both(mx.array(np.stack([row, row])))).argmax(axis=-1).tolist() == [5, 5]


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10**6))
def test_filters_follow_each_other_in_order(seed: int) -> None:
    """Each filter sees the distribution over those that the one before has left."""
    row = row_of(seed)
    left = row
    for options in (
        {"top_n_sigma": 2.0},
        {"top_k": 20},
        {"typical_p": 0.8},
        {"top_p": 0.9},
        {"min_p": 0.1},
    ):
        ids = kept(**options)(left)
        left = np.where(np.isin(np.arange(WIDTH), list(ids)), left, -np.inf).astype(np.float32)
        left = left if ids else row
    together = kept(top_n_sigma=2.0, top_k=20, typical_p=0.8, top_p=0.9, min_p=0.1)(row)
    assert together == set(np.flatnonzero(left > -np.inf).tolist())


@settings(deadline=None, max_examples=12)  # mlx-lm compiles it anew for each threshold
@given(
    st.integers(0, 10**6),
    st.sampled_from([0.0, 0.02, 0.1, 0.5]),
    st.sampled_from([(), (3, 7)]),
)
def test_xtc_is_that_of_mlx_lm(seed: int, threshold: float, special: tuple[int, ...]) -> None:
    row = row_of(seed)
    sampling = Sampling(seed=0, temperature=0.5, xtc_probability=1.0, xtc_threshold=threshold)
    found = Xtc([(0, sampling, special)], WIDTH)(mx.array(row[None]) / 0.5, np.zeros(1))
    expected = apply_xtc(mx.array(row[None]), 1.0, threshold, list(special))
    assert np.array_equal(np.array(found) > -np.inf, np.array(expected) > -np.inf)
    assert (np.array(found) > -np.inf).any()


def test_xtc_applies_as_often_as_it_is_asked_to() -> None:
    x = mx.array([[0.0, 3.0, 2.5, 2.0]])
    sampling = Sampling(seed=5, temperature=1.0, xtc_probability=0.3, xtc_threshold=0.1, top_k=2)
    sampler = Sampler([SequenceSampling(sampling)], 4)
    drawn = [sampler(x, [p]).item() for p in range(3000)]
    # Without XTC token 1 is drawn in 62 of 100 cases, with it never.
    assert drawn.count(1) / 3000 == pytest.approx(0.7 * 0.622, abs=0.03)
    assert set(drawn) == {1, 2}
    always = Sampling(seed=5, temperature=1.0, xtc_probability=1.0, xtc_threshold=0.1)
    sampler = Sampler([SequenceSampling(always, kept_by_xtc=(1,))], 4)
    assert {sampler(x, [p]).item() for p in range(200)} == {0, 1, 3}


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=30),
    st.integers(1, 40),
    st.integers(0, 29),
    st.integers(0, 10**6),
)
def test_windows_are_those_of_mlx_lm(
    tokens: list[int], window: int, generated: int, seed: int
) -> None:
    """The last tokens of prompt and answer count, as in mlx-lm, for one penalty each."""
    generated = min(generated, len(tokens))
    x = row_of(seed)[None]
    for name in ("repetition", "presence", "frequency"):
        asked = {f"{name}_penalty": 1.5, f"{name}_window": window}
        row = SequenceSampling(Sampling(seed=0, temperature=0.0, **asked))  # type: ignore[arg-type]
        sampler = Sampler([row], WIDTH, [RowMemory.of(row, tokens, generated, WIDTH)])
        found = np.array(sampler._penalise(mx.array(x), [generated]))
        theirs = {f"{name}_penalty": 1.5, f"{name}_context_size": window}
        [process] = make_logits_processors(**theirs)  # type: ignore[arg-type]
        expected = np.array(process(mx.array(tokens), mx.array(x)))
        assert np.allclose(found, expected, atol=1e-4), name


def test_only_allowed_ids_are_sampled() -> None:
    rows = [
        SequenceSampling(Sampling(seed=1, temperature=2.0, allowed_ids=(3, 9))),
        SequenceSampling(Sampling(seed=2, temperature=0.0, allowed_ids=(7,))),
        SequenceSampling(Sampling(seed=3, temperature=2.0)),
    ]
    sampler = Sampler(rows, WIDTH)
    x = mx.array(np.stack([row_of(i) for i in range(3)]))
    drawn = np.array([sampler(x, [p] * 3).tolist() for p in range(100)])
    assert set(drawn[:, 0]) == {3, 9} and set(drawn[:, 1]) == {7} and len(set(drawn[:, 2])) > 5
