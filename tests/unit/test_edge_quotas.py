"""Quotas of an API key."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mayfly_server.errors import RateLimited
from mayfly_server.http.api_keys import Key
from mayfly_server.http.rate_limit import Bucket, Quotas


@given(
    st.integers(1, 1000),
    st.lists(st.floats(0, 30), min_size=1, max_size=300),
)
def test_a_bucket_never_lets_more_through_than_it_may(per_minute: int, gaps: list[float]) -> None:
    bucket = Bucket(per_minute, float(per_minute), 0.0)
    now, taken = 0.0, 0
    for gap in gaps:
        now += gap
        wait_s = bucket.take(now)
        assert 0 <= wait_s <= 60 / per_minute + 1e-6
        taken += wait_s == 0
        assert taken <= per_minute + now * per_minute / 60 + 1e-6


@given(st.integers(1, 1000), st.floats(0, 1e6))
def test_who_waits_as_long_as_told_gets_through(per_minute: int, start: float) -> None:
    bucket = Bucket(per_minute, 0.0, start)
    wait_s = bucket.take(start)
    assert wait_s > 0
    assert bucket.take(start + wait_s * (1 + 1e-9) + 1e-6) == 0


def test_a_minutes_worth_then_evenly() -> None:
    quotas, key = Quotas(), Key("alice", b"a", requests_per_minute=3)
    for _ in range(3):
        quotas.enter(key, 100.0)
        quotas.leave(key)
    with pytest.raises(RateLimited) as caught:
        quotas.enter(key, 100.0)
    assert caught.value.retry_after_s == pytest.approx(20)
    quotas.enter(key, 120.0)
    with pytest.raises(RateLimited):
        quotas.enter(key, 121.0)


def test_so_many_at_a_time() -> None:
    quotas, key = Quotas(), Key("alice", b"a", concurrency=2)
    other = Key("bob", b"b", concurrency=1)
    quotas.enter(key, 0.0)
    quotas.enter(key, 0.0)
    quotas.enter(other, 0.0)
    with pytest.raises(RateLimited) as caught:
        quotas.enter(key, 0.0)
    assert caught.value.code == "concurrency_limit_exceeded"
    quotas.leave(key)
    quotas.enter(key, 0.0)


def test_a_changed_limit_holds_at_once() -> None:
    quotas = Quotas()
    quotas.enter(Key("alice", b"a", requests_per_minute=1), 0.0)
    with pytest.raises(RateLimited):
        quotas.enter(Key("alice", b"a", requests_per_minute=1), 0.0)
    quotas.enter(Key("alice", b"a", requests_per_minute=2), 0.0)
    quotas.enter(Key("alice", b"a"), 0.0)
