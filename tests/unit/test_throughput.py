"""Tokens per second, computed from counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mayfly_server.api.admin.status import MIN_RATE_INTERVAL_S, RATE_WINDOW_S, Throughput


def test_a_rate_takes_a_while_to_be_known() -> None:
    throughput = Throughput()
    assert throughput.update({"a": 0}, 0.0) == {"a": None}
    assert throughput.update({"a": 10}, 0.5) == {"a": None}
    assert throughput.update({"a": 20}, 1.0) == {"a": 20.0}


def test_only_the_last_seconds_count() -> None:
    throughput = Throughput()
    for second in range(10):
        throughput.update({"a": 100 * second}, float(second))
    for second in range(10, 15):
        rates = throughput.update({"a": 900}, float(second))
    assert rates == {"a": 0.0}


def test_each_has_its_own_and_who_left_is_forgotten() -> None:
    throughput = Throughput()
    throughput.update({"a": 0, "b": 0}, 0.0)
    assert throughput.update({"a": 4, "b": 8}, 2.0) == {"a": 2.0, "b": 4.0}
    throughput.update({"b": 8}, 3.0)
    assert throughput.update({"a": 0, "b": 8}, 4.0)["a"] is None


@given(
    per_second=st.integers(1, 10_000),
    gaps=st.lists(st.floats(0.1, 1.0), min_size=10, max_size=60),
)
def test_a_steady_writer_has_its_own_rate(per_second: int, gaps: list[float]) -> None:
    throughput, now = Throughput(), 0.0
    for gap in gaps:
        now += gap
        rate = throughput.update({"a": round(per_second * now)}, now)["a"]
        if rate is not None:
            # A count is off by half a token at each end of a window.
            assert rate == pytest.approx(per_second, abs=1 / MIN_RATE_INTERVAL_S + 0.01)
    assert now < RATE_WINDOW_S or rate is not None
