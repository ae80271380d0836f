"""Rendezvous hashing with bounded loads."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from mayfly_server.pool.routing import LOAD_BOUND, Candidate, choose

names = st.text("abcdefgh/-0123456789", min_size=1, max_size=8)
loads = st.dictionaries(names, st.integers(0, 50), min_size=1, max_size=12)
keys = st.binary(min_size=1, max_size=64)


def candidates(load_of: dict[str, int]) -> list[Candidate[str]]:
    return [Candidate(name, load, name) for name, load in load_of.items()]


def chosen(load_of: dict[str, int], key: bytes | None) -> str:
    best = choose(candidates(load_of), key)
    assert best is not None
    return best.name


def test_nobody_there() -> None:
    assert choose([], b"key") is None
    assert choose([], None) is None


@settings(deadline=None, max_examples=50)
@given(loads, keys)
def test_no_worker_gets_more_than_its_share(load_of: dict[str, int], key: bytes) -> None:
    share = math.ceil(LOAD_BOUND * (sum(load_of.values()) + 1) / len(load_of))
    assert load_of[chosen(load_of, key)] + 1 <= share


@settings(deadline=None, max_examples=50)
@given(loads, keys, st.randoms(use_true_random=False))
def test_every_front_end_prefers_the_same(load_of: dict[str, int], key: bytes, random) -> None:  # type: ignore[no-untyped-def]
    """Whatever the order in which it learned of the workers."""
    shuffled = candidates(load_of)
    random.shuffle(shuffled)
    best = choose(shuffled, key)
    assert best is not None
    assert best.name == chosen(load_of, key)


@settings(deadline=None, max_examples=50)
@given(st.sets(names, min_size=2, max_size=12), keys)
def test_another_workers_end_moves_no_conversation(workers: set[str], key: bytes) -> None:
    idle = dict.fromkeys(workers, 0)
    home = chosen(idle, key)
    for name in workers - {home}:
        assert chosen({other: 0 for other in workers if other != name}, key) == home


@settings(deadline=None, max_examples=50)
@given(loads)
def test_without_a_conversation_the_least_loaded(load_of: dict[str, int]) -> None:
    assert load_of[chosen(load_of, None)] == min(load_of.values())


def test_conversations_spread() -> None:
    idle = dict.fromkeys(("a", "b", "c", "d"), 0)
    homes = [chosen(idle, str(i).encode()) for i in range(2000)]
    assert all(400 < homes.count(name) < 600 for name in idle)


def test_a_busy_home_sends_on() -> None:
    home = chosen({"a": 0, "b": 0}, b"conversation")
    busy = {"a": 0, "b": 0} | {home: 5}
    assert chosen(busy, b"conversation") != home
    assert chosen({"a": 5, "b": 5}, b"conversation") == home
