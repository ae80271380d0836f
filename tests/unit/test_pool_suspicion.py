"""Suspects and culprits among requests: the rules alone, and in a simulation of workers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from mayfly_protocol.requests import Generation, Sampling, TextPrompt
from mayfly_protocol.roster import Loss
from mayfly_protocol.serving import Accepted, Delta, Handover
from mayfly_server.dispatch.mailbox import Lost
from mayfly_server.dispatch.quarantine import (
    CULPRIT,
    NEAR,
    SUSPECT,
    Record,
    near,
    served_others,
    unrelated,
)
from mayfly_server.dispatch.request_progress import RequestProgress
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


def test_a_death_elsewhere_begins_anew() -> None:
    assert deaths(20, 21 + NEAR) == deaths(21 + NEAR)
    assert deaths(20, 20, 21 + NEAR, flagged=True) == deaths(21 + NEAR)


def test_B01_a_death_there_of_another_kind_counts_and_names_its_kind() -> None:
    """Another culprit in the same pass brought about the one before."""
    other = deaths(20).after("wedged", (20,), flagged=False)
    assert (other.kind, other.deaths) == ("wedged", 2)


def test_one_that_got_on_is_no_suspect() -> None:
    record = deaths(20, 20)
    assert record.suspect((20 + NEAR,))
    assert not record.suspect((21 + NEAR,))


def test_B01_a_death_is_compared_with_the_one_before() -> None:
    """The first may have been another culprit's, just before this one's place."""
    assert deaths(0, NEAR, NEAR + 1).suspect((NEAR + 1,))
    assert deaths(0, NEAR, 2 * NEAR + 1).deaths == 1


def test_only_a_death_under_the_flag_condemns() -> None:
    assert not deaths(5, 5, 5, 5, 5).culprit
    assert deaths(5, 5).after("crashed", (5,), flagged=True).culprit
    assert deaths(5, 5).after("wedged", (5,), flagged=True).culprit
    assert not deaths(5, 5).after("crashed", (6 + NEAR,), flagged=True).culprit


def test_every_choice_has_to_be_near() -> None:
    assert near((1, 100), (3, 100))
    assert not near((1, 100), (3, 100 + NEAR + 1))
    assert not near((1,), (1, 1))
    assert near((), ())


@given(st.lists(st.tuples(st.integers(0, 40), st.booleans(), st.sampled_from("ab"))))
def test_condemned_needs_three_deaths_about_one_point(
    story: list[tuple[int, bool, str]],
) -> None:
    record = Record()
    for at, wanted, kind in story:
        flagged = wanted and record.suspect((at,))  # none other is ever flagged
        before, record = record, record.after(kind, (at,), flagged=flagged)
        if record.culprit and not before.culprit:
            same = [p for p, _, _ in story if abs(p - record.point[0]) <= 2 * NEAR]
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


def test_B03_what_others_got_from_a_worker_tells_its_request_from_the_machine() -> None:
    prefill = Loss("s", 1, "crashed", "worker", "", 0.0, suspects=("p",))
    assert not served_others((), prefill)
    assert not served_others({"p"}, prefill)
    assert served_others({"innocent"}, prefill)
    decode = Loss("s", 1, "crashed", "worker", "", 0.0, marked=("p", "innocent"))
    assert not served_others({"p"}, decode), "it may be the culprit itself"
    assert served_others({"p", "innocent"}, decode)
    assert not served_others({"p"}, None), "it may yet die of it"
    assert served_others({"p", "innocent"}, None)


@given(st.lists(st.frozensets(st.sampled_from("abcdef"), max_size=4), max_size=40))
def test_one_culprit_is_never_the_machines(others: list[frozenset[str]]) -> None:
    assert not unrelated([other | {"culprit"} for other in others])


# A small world

ATTEMPTS = 5
GENERATION = Generation("m", TextPrompt("p"), Sampling(seed=1))


@dataclass
class SimulatedRequest:
    name: str
    length: int
    fatal: int | None = None
    """The token that a worker fails at when it computes it."""
    kind: str = ""
    stays: bool = False
    """The fault breaks the batch, and the worker stays."""
    progress: RequestProgress = field(init=False)
    tokens: int = 0
    """Number of tokens that the present worker, or those before it, generated."""
    delivered: int = 0
    resumed: int = 0
    flagged: bool = False
    error: str = ""
    struck: int = 0
    """Number of failed passes with this request since its last new token."""
    most_struck: int = 0

    def __post_init__(self) -> None:
        self.progress = RequestProgress(self.name, GENERATION)

    @property
    def done(self) -> bool:
        return self.delivered >= self.length or bool(self.error)

    @property
    def suspect(self) -> bool:
        return self.flagged and self.tokens - self.resumed < YOUNG_TOKENS

    def submit(self) -> None:
        submit = self.progress.submit()
        self.progress.receive(Accepted(self.name, submit.attempt, 7))
        self.tokens = self.resumed = self.delivered
        self.flagged = submit.suspect

    def deliver(self, upto: int) -> None:
        if upto > self.delivered:
            ids = tuple(range(self.delivered, upto))
            end = "stop" if upto == self.length else None
            delta = Delta(self.name, self.progress.attempt, 0, self.delivered, ids=ids, finish=end)
            assert self.progress.receive(delta) == delta
            self.delivered, self.struck = upto, 0

    def lose(self, kind: str, *, struck: bool, stays: bool) -> None:
        """Takes a failure of a worker as the relay does."""
        attempt = self.progress.attempt
        if stays:
            self.progress.receive(Handover(self.name, attempt, kind, suspect=struck, stays=True))
        else:
            self.progress.receive(Lost(kind))
            if not struck:
                self.progress.not_named()
        if struck:
            self.struck += 1
            self.most_struck = max(self.most_struck, self.struck)
            self.progress.worker_died(kind)
        if self.progress.record.culprit:
            self.error = self.progress.record.kind
        elif self.progress.losses >= ATTEMPTS or self.progress.moves >= 10 * ATTEMPTS:
            self.error = "lost"


class SimulatedWorkers:
    """Workers that prefill what has come in groups and decode all they have in one batch, but a
    suspect alone; where a worker fails, everything on it goes to any worker."""

    def __init__(self, workers: int, seed: int) -> None:
        self.chance = random.Random(seed)
        self.workers: list[list[SimulatedRequest]] = [[] for _ in range(workers)]
        self.prefilled: list[set[str]] = [set() for _ in range(workers)]
        self.faults: list[str] = []
        """The culprit of each fault."""
        self.moved: dict[str, int] = {}

    def submit(self, request: SimulatedRequest) -> None:
        request.submit()
        self.chance.choice(self.workers).append(request)

    def turn(self) -> None:
        for number in range(len(self.workers)):
            self._turn(number)

    def _turn(self, number: int) -> None:
        here = self.workers[number] = [r for r in self.workers[number] if not r.done]
        seen = self.prefilled[number]
        suspects = [r for r in here if r.suspect][:1]  # a worker runs one at a time
        others = [r for r in here if not r.suspect]
        new = [r for r in others if r.name not in seen]
        groups = [new[: self.chance.randint(1, 8)], [r for r in suspects if r.name not in seen]]
        for group in groups:
            for request in group:
                if request.fatal is not None and request.fatal < request.resumed:
                    self.fail(number, request, group)
                    return
            seen.update(r.name for r in group)
        for batch in (others, suspects):
            batch = [r for r in batch if r.name in seen]
            for request in batch:
                if request.fatal == request.tokens:
                    self.fail(number, request, batch)
                    return
            for request in batch:
                request.tokens = min(request.tokens + 1, request.length)
                unsent = self.chance.randint(0, 2) if request.tokens < request.length else 0
                request.deliver(request.tokens - unsent)

    def fail(
        self, number: int, culprit: SimulatedRequest, struck: Sequence[SimulatedRequest]
    ) -> None:
        self.faults.append(culprit.name)
        here, self.workers[number], self.prefilled[number] = self.workers[number], [], set()
        for request in here:
            if request.done:
                continue
            self.moved[request.name] = self.moved.get(request.name, 0) + 1
            request.lose(culprit.kind, struck=request in struck, stays=culprit.stays)
            if not request.done:
                self.submit(request)


@settings(deadline=None, max_examples=300)
@given(
    seed=st.integers(0, 2**32),
    workers=st.integers(1, 4),
    innocents=st.integers(0, 24),
    poisons=st.lists(
        st.tuples(
            st.sampled_from([0, 0, 1, 5, 30, 200]),  # the fatal token
            st.booleans(),  # the worker may fail when it reads the token again (a prefill)
            st.sampled_from(["crashed", "wedged", "shape", "unknown"]),
        ),
        min_size=1,
        max_size=8,
    ),
    at_once=st.booleans(),
)
def test_B01_poisons_cost_three_faults_each_and_nobody_else_anything(
    seed: int,
    workers: int,
    innocents: int,
    poisons: list[tuple[int, bool, str]],
    at_once: bool,
) -> None:
    world = SimulatedWorkers(workers, seed)
    condemned = [
        SimulatedRequest(
            f"poison {n}",
            300,
            fatal - 1 if fatal and behind else fatal,
            kind,
            stays=kind == "shape",
        )
        for n, (fatal, behind, kind) in enumerate(poisons)
    ]
    everyone = [SimulatedRequest(f"r{n}", world.chance.randint(1, 250)) for n in range(innocents)]
    waiting = [*everyone, *condemned]
    world.chance.shuffle(waiting)
    for _ in range(20_000):
        while waiting and (at_once or world.chance.random() < 0.4):
            world.submit(waiting.pop())
        world.turn()
        if not waiting and all(r.done for r in (*everyone, *condemned)):
            break
    assert [r.error for r in everyone] == [""] * innocents
    assert [r.delivered for r in everyone] == [r.length for r in everyone]
    assert [r.error for r in condemned] == [r.kind for r in condemned]
    assert max(world.faults.count(r.name) for r in condemned) <= CULPRIT
    assert max([r.most_struck for r in everyone], default=0) <= SUSPECT


@settings(deadline=None, max_examples=100)
@given(seed=st.integers(0, 2**32), at=st.integers(0, 60))
def test_a_single_fault_makes_no_suspects(seed: int, at: int) -> None:
    """So it delays nobody by more than it takes to go on elsewhere."""
    world = SimulatedWorkers(2, seed)
    everyone = [SimulatedRequest(f"r{n}", 100) for n in range(16)]
    for request in everyone:
        world.submit(request)
    for turn in range(400):
        if turn == at:
            world.fail(0, SimulatedRequest("nobody", 0), world.workers[0])
        assert not any(r.flagged for r in everyone)
        world.turn()
    assert [r.delivered for r in everyone] == [100] * 16
