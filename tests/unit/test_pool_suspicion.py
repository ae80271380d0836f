"""Suspects and culprits among requests: the rules alone, and in a simulation of workers."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from mayfly_server.dispatch.quarantine import CULPRIT, NEAR, Record, near, unrelated
from mayfly_worker.engine.sequence import YOUNG_TOKENS


def deaths(*at: int, flagged: bool = False, kind: str = "crashed") -> Record:
    record = Record()
    for point in at:
        record = record.after(kind, (point,), flagged=flagged)
    return record


def test_the_first_death_marks_and_the_second_makes_a_suspect() -> None:
    assert not Record().suspect((0,))
    assert not deaths(20).suspect((20,))
    assert deaths(20, 20).suspect((20,))
    assert deaths(20, 20 + NEAR).suspect((20,))


def test_a_death_elsewhere_or_of_another_kind_begins_anew() -> None:
    assert deaths(20, 21 + NEAR) == deaths(21 + NEAR)
    other = deaths(20).after("wedged", (20,), flagged=False)
    assert other == deaths(20, kind="wedged")


def test_one_that_got_on_is_no_suspect() -> None:
    record = deaths(20, 20)
    assert record.suspect((20 + NEAR,))
    assert not record.suspect((21 + NEAR,))


def test_about_there_does_not_creep() -> None:
    """Each within reach of the one before, but not of the first."""
    assert deaths(0, NEAR, 2 * NEAR).deaths == 1


def test_only_a_death_under_the_flag_condemns() -> None:
    assert not deaths(5, 5, 5, 5, 5).culprit
    assert deaths(5, 5).after("crashed", (5,), flagged=True).culprit
    assert not deaths(5, 5).after("wedged", (5,), flagged=True).culprit


def test_every_choice_has_to_be_near() -> None:
    assert near((1, 100), (3, 100))
    assert not near((1, 100), (3, 100 + NEAR + 1))
    assert not near((1,), (1, 1))
    assert near((), ())


@given(st.lists(st.tuples(st.integers(0, 40), st.booleans(), st.sampled_from("ab"))))
def test_condemned_needs_three_deaths_of_a_kind_about_one_point(
    story: list[tuple[int, bool, str]],
) -> None:
    record = Record()
    for at, wanted, kind in story:
        flagged = wanted and record.suspect((at,))  # none other is ever flagged
        before, record = record, record.after(kind, (at,), flagged=flagged)
        if record.culprit and not before.culprit:
            same = [p for p, _, k in story if k == kind and abs(p - record.point[0]) <= NEAR]
            assert flagged
            assert len(same) >= CULPRIT


def test_three_deaths_with_nothing_in_common_are_the_machines() -> None:
    assert not unrelated([])
    assert not unrelated([("a",), ("b",)])
    assert unrelated([("a",), ("b",), ("c", "d")])
    assert not unrelated([("a", "p"), ("b", "p"), ("p",)])
    assert not unrelated([("a",), (), ()]), "nobody was there"
    assert not unrelated([("a",), ("a",), ("a",)])
    assert unrelated([("a", "p"), ("b", "p"), ("p",), ("x",), ("y",)])


@given(st.lists(st.frozensets(st.sampled_from("abcdef"), max_size=4), max_size=40))
def test_one_culprit_is_never_the_machines(others: list[frozenset[str]]) -> None:
    assert not unrelated([other | {"culprit"} for other in others])


# A small world


@dataclass
class SimulatedRequest:
    name: str
    length: int
    fatal: int | None = None
    """The token that a worker dies of when it computes it."""
    record: Record = field(default_factory=Record)
    tokens: int = 0
    resumed: int = 0
    flagged: bool = False
    culprit: bool = False

    @property
    def done(self) -> bool:
        return self.tokens >= self.length or self.culprit

    @property
    def harmless(self) -> bool:
        return self.tokens - self.resumed >= YOUNG_TOKENS


class SimulatedWorkers:
    """Workers that prefill what has come in groups and decode all they have in one batch; where a
    worker dies, everything on it goes to others."""

    def __init__(self, workers: int, seed: int) -> None:
        self.chance = random.Random(seed)
        self.workers: list[list[SimulatedRequest]] = [[] for _ in range(workers)]
        self.prefilled: list[set[str]] = [set() for _ in range(workers)]
        self.deaths = 0
        self.moved: dict[str, int] = {}

    def submit(self, request: SimulatedRequest) -> None:
        request.resumed = request.tokens
        request.flagged = request.record.suspect((request.tokens,))
        self.chance.choice(self.workers).append(request)

    def turn(self) -> None:
        for number in range(len(self.workers)):
            here = self.workers[number] = [r for r in self.workers[number] if not r.done]
            running, seen = self._running(here), self.prefilled[number]
            new = [r for r in running if r.name not in seen]
            group = new[: self.chance.randint(1, 8)]
            if any(r.fatal is not None and r.fatal < r.resumed for r in group):
                self._die(number, group)
                continue
            seen.update(r.name for r in group)
            batch = [r for r in running if r.name in seen]
            if any(r.fatal == r.tokens for r in batch):
                self._die(number, batch)
                continue
            for request in batch:
                request.tokens += 1

    def _running(self, here: list[SimulatedRequest]) -> list[SimulatedRequest]:
        """A worker's desk: one suspect at a time, first come first served."""
        suspects = [r for r in here if r.flagged and not r.harmless]
        return [r for r in here if r not in suspects[1:]]

    def _die(self, number: int, struck: list[SimulatedRequest]) -> None:
        self.deaths += 1
        here, self.workers[number], self.prefilled[number] = self.workers[number], [], set()
        for request in here:
            if request.done:
                continue
            unsent = self.chance.randint(0, 2)
            request.tokens = max(request.resumed, request.tokens - unsent)
            self.moved[request.name] = self.moved.get(request.name, 0) + 1
            if request in struck:
                at = (request.tokens,)
                request.record = request.record.after("crashed", at, flagged=request.flagged)
                request.culprit = request.record.culprit
            if not request.culprit:
                self.submit(request)


@settings(deadline=None, max_examples=200)
@given(
    seed=st.integers(0, 2**32),
    workers=st.integers(1, 4),
    innocents=st.integers(0, 40),
    fatal=st.sampled_from([0, 0, 1, 5, 30, 200]),
    behind=st.integers(0, 1),
)
def test_one_poison_costs_three_workers_and_nobody_else_anything(
    seed: int, workers: int, innocents: int, fatal: int, behind: int
) -> None:
    """``behind``: the worker may die when it reads the fatal token again, too (a prefill)."""
    world = SimulatedWorkers(workers, seed)
    poison = SimulatedRequest("poison", 300, fatal)
    if behind:
        poison.fatal = fatal - 1 if fatal else 0
    waiting = [SimulatedRequest(f"r{n}", world.chance.randint(1, 250)) for n in range(innocents)]
    everyone = [*waiting]
    waiting.insert(world.chance.randint(0, innocents), poison)
    for _ in range(5000):
        while waiting and world.chance.random() < 0.4:
            world.submit(waiting.pop(0))
        world.turn()
        if not waiting and all(r.done for r in (*everyone, poison)):
            break
    assert poison.culprit
    assert world.deaths == CULPRIT
    assert [r.name for r in everyone if r.culprit] == []
    assert all(r.tokens == r.length for r in everyone)
    assert max(world.moved.values()) <= CULPRIT


@settings(deadline=None, max_examples=100)
@given(seed=st.integers(0, 2**32), at=st.integers(0, 60), phase=st.booleans())
def test_a_single_fault_makes_no_suspects(seed: int, at: int, phase: bool) -> None:
    """So it delays nobody by more than it takes to go on elsewhere."""
    world = SimulatedWorkers(2, seed)
    everyone = [SimulatedRequest(f"r{n}", 100) for n in range(16)]
    for request in everyone:
        world.submit(request)
    for turn in range(400):
        if turn == at:
            running = [r for r in world.workers[0] if not r.done]
            world._die(0, running)
        assert not any(r.flagged for r in everyone)
        world.turn()
    assert all(r.tokens == r.length for r in everyone)
