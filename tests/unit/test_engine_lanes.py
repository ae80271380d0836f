"""Rows that are much longer than the others decode in a sub-batch of their own, where that is
cheaper."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.utils import load_model

from mayfly_worker.engine import sub_batches
from mayfly_worker.engine.admission import Budget
from mayfly_worker.engine.sampler import SequenceSampling
from mayfly_worker.engine.sequence import SequenceState
from mayfly_worker.engine.sub_batches import MOST, cheapest_batch, pass_cost_tokens
from support.engine_harness import GREEDY, EngineHarness, EngineRequest

NEW = -1
INFINITE = float("inf")


@pytest.mark.parametrize(
    ("running", "joining", "price", "lane"),
    [
        ([], [50], 0.0, NEW),
        ([[50] * 7], [3000], 2000.0, NEW),
        ([[50] * 7], [3000], INFINITE, 0),
        ([[50] * 7], [300], 2000.0, 0),
        ([[3000]], [50], 2000.0, NEW),
        ([[3000]], [50] * 7, 2000.0, NEW),
        ([[3000]], [2900], 2000.0, 0),
        ([[50] * 7, [3000]], [60], 2000.0, 0),
        ([[50] * 7, [3000]], [2000], 2000.0, 1),
        ([[50] * 7, [3000]], [30_000], 2000.0, 1),  # two are enough
        ([[500], [500] * 3], [500], 0.0, 1),  # so that the smaller one runs empty
    ],
)
def test_where_rows_join(
    running: list[list[int]], joining: list[int], price: float, lane: int
) -> None:
    assert cheapest_batch(running, joining, price) == (len(running) if lane == NEW else lane)


lengths = st.lists(st.integers(1, 10_000), min_size=1, max_size=8)


@given(running=st.lists(lengths, max_size=MOST), joining=lengths, price=st.floats(0, 1e6))
def test_no_other_place_is_cheaper(
    running: list[list[int]], joining: list[int], price: float
) -> None:
    def cost(lane: int) -> float:
        after = [*running, []] if lane == len(running) else list(running)
        after[lane] = [*after[lane], *joining]
        return sum(len(rows) * max(rows) + price for rows in after)

    places = range(min(MOST, len(running) + 1))
    best = cheapest_batch(running, joining, price)
    assert best in places
    assert cost(best) <= min(map(cost, places)) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("device", "launch"),
    [
        ("cpu", 0),
        ("metal", sub_batches.METAL_LAUNCH_BYTES),
        ("cuda", sub_batches.CUDA_LAUNCH_BYTES),
    ],
)
def test_what_a_forward_pass_costs(
    monkeypatch: pytest.MonkeyPatch, device: str, launch: int
) -> None:
    for name in ("metal", "cuda"):
        monkeypatch.setattr(getattr(mx, name), "is_available", lambda name=name: name == device)
    assert pass_cost_tokens(512_000, 512) == 1000 + launch / 512
    assert pass_cost_tokens(512_000, 0) == INFINITE


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Any:
    return load_model(tiny_model)[0]


def asks() -> list[EngineRequest]:
    rng = random.Random(1)
    lengths = (20, 600, 30, 25)
    budgets = (24, 12, 30, 18)
    return [
        EngineRequest([rng.randrange(8, 1700) for _ in range(length)], GREEDY, max_tokens=budget)
        for length, budget in zip(lengths, budgets, strict=True)
    ]


def test_a_long_row_goes_apart_and_all_say_what_they_say_alone(model: Any) -> None:
    alone = [EngineHarness(model, 1800).run([ask])[0].ids() for ask in asks()]
    harness = EngineHarness(model, 1800, pass_cost_tokens=500.0)
    decode = harness.engine._decode
    seen = set()
    keys = [harness.submit(ask) for ask in asks()]
    while harness.open:
        harness.turn()
        seen.add(tuple(sorted(len(batch) for batch in decode.batches)))
        for batch in decode.batches:
            sizes = [len(row.tokens) for row in batch.rows]
            assert max(sizes) < 600 or min(sizes) >= 600
    assert [harness.answers[key].ids() for key in keys] == alone
    assert (1, 3) in seen
    assert len(decode) == 0
    assert decode.batches == []


def test_who_outgrows_the_budget_is_the_newest_wherever_it_is(model: Any) -> None:
    """A short row takes less memory in a sub-batch of its own than in the long one's batch."""
    harness = EngineHarness(model, 1800, pass_cost_tokens=0.0)
    first, second, *_ = asks()
    [old] = [harness.submit(second)]
    while not len(harness.engine._decode):
        harness.turn()
    young = harness.submit(first)
    while len(harness.engine._decode) < 2:
        harness.turn()
    assert [len(batch) for batch in harness.engine._decode.batches] == [1, 1]
    harness.engine._budget = Budget(32, 620 * 256, 256)
    harness.turn()
    assert [row.id for row in harness.engine._decode.rows] == [0]
    harness.finish()
    assert harness.answers[old].ids() == EngineHarness(model, 1800).run([second])[0].ids()
    assert harness.answers[young].ids() == EngineHarness(model, 1800).run([first])[0].ids()


def test_lanes_are_counted_one_by_one() -> None:
    def row(length: int) -> SequenceState:
        return SequenceState(0, [1] * length, SequenceSampling.greedy(), 1)

    budget = Budget(32, 1000, bytes_per_token=2, bytes_per_row=10)
    assert budget.holds([[row(200), row(200)]])  # 2 * 200 * 2 + 2 * 10
    assert not budget.holds([[row(300), row(20)]])
    assert budget.holds([[row(300)], [row(20)]])
