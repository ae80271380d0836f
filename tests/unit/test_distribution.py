"""Measurements counted in buckets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mayfly_protocol.common.histogram import NOTHING, STEP_BOUNDS_S, Distribution

BOUNDS = (0.1, 0.5, 1.0)
values = st.lists(st.floats(0, 10))


def of(measured: list[float]) -> Distribution:
    found = Distribution((0,) * (len(BOUNDS) + 1))
    for value in measured:
        found = found.observed(value, BOUNDS)
    return found


def test_a_bound_belongs_to_the_bucket_below_it() -> None:
    assert of([0.1, 0.11, 0.5, 1.0, 1.1, 7.0]).counts == (1, 2, 1, 2)


def test_nothing_was_measured() -> None:
    assert of([]) == Distribution((0, 0, 0, 0), 0.0)
    assert (NOTHING.count, NOTHING.sum) == (0, 0.0)
    assert NOTHING.plus(of([0.2])) == of([0.2]) == of([0.2]).plus(NOTHING)
    assert NOTHING.observed(0.2, BOUNDS) == of([0.2])


@given(values, values)
def test_two_together_are_as_one(some: list[float], more: list[float]) -> None:
    both = of(some).plus(of(more))
    assert both.counts == of(some + more).counts
    assert abs(both.sum - of(some + more).sum) < 1e-6
    assert both.count == len(some) + len(more)


def test_a_measurement_does_not_change_the_distribution_before_it() -> None:
    before = NOTHING
    after = before.observed(0.02, STEP_BOUNDS_S)
    assert before.count == 0
    assert after.count == 1
