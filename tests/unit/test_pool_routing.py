"""Rendezvous hashing with bounded loads."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from mayfly_server.dispatch.routing import LOAD_BOUND, Candidate, choose

names = st.text("abcdefgh/-0123456789", min_size=1, max_size=8)
loads = st.dictionaries(names, st.integers(0, 50), min_size=1, max_size=12)
keys = st.binary(min_size=1, max_size=64)


capacities = st.integers(1, 128)


def candidates(
    load_of: dict[str, int], capacity_of: dict[str, int] | None = None
) -> list[Candidate[str]]:
    return [
        Candidate(name, load, name, (capacity_of or {}).get(name, 1))
        for name, load in load_of.items()
    ]


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
    """The order in which a front end learned of the workers does not matter."""
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


@settings(deadline=None, max_examples=100)
@given(st.dictionaries(names, st.tuples(st.integers(0, 50), capacities), min_size=1), keys)
def test_a_share_is_in_proportion_to_what_a_worker_can_run(
    workers: dict[str, tuple[int, int]], key: bytes
) -> None:
    load_of = {name: load for name, (load, _) in workers.items()}
    capacity_of = {name: capacity for name, (_, capacity) in workers.items()}
    best = choose(candidates(load_of, capacity_of), key)
    assert best is not None, "somebody always has less than his share"
    total, whole = sum(load_of.values()) + 1, sum(capacity_of.values())
    assert best.load + 1 <= math.ceil(LOAD_BOUND * total * best.capacity / whole)


@settings(deadline=None, max_examples=50)
@given(st.dictionaries(names, capacities, min_size=2, max_size=12), keys)
def test_another_workers_end_moves_no_conversation_between_unequal_ones(
    capacity_of: dict[str, int], key: bytes
) -> None:
    idle = dict.fromkeys(capacity_of, 0)
    home = choose(candidates(idle, capacity_of), key)
    assert home is not None
    for gone in capacity_of.keys() - {home.name}:
        left = {name: 0 for name in capacity_of if name != gone}
        again = choose(candidates(left, capacity_of), key)
        assert again is not None and again.name == home.name


def test_conversations_spread_by_capacity() -> None:
    capacity_of = {"studio": 64, "mini": 16, "air": 16}
    idle = dict.fromkeys(capacity_of, 0)
    homes = [choose(candidates(idle, capacity_of), str(i).encode()) for i in range(3000)]
    counts = {name: sum(home is not None and home.name == name for home in homes) for name in idle}
    assert 1850 < counts["studio"] < 2150
    assert all(400 < counts[name] < 600 for name in ("mini", "air"))


def test_load_without_a_conversation_is_by_capacity_too() -> None:
    best = choose(candidates({"studio": 5, "mini": 2}, {"studio": 64, "mini": 16}), None)
    assert best is not None and best.name == "studio"
