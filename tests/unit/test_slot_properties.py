"""Whatever happens, in whatever order: what must hold for a slot all the same."""

from __future__ import annotations

import itertools
import signal
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mayfly_protocol.lifecycle import (
    Beat,
    Bye,
    Cause,
    Fault,
    Hello,
    Loading,
    ModelCard,
    Ready,
    ToReaper,
)
from mayfly_reaper.actions import Action, Record, Send, Signal, Spawn
from mayfly_reaper.events import (
    Event,
    Exited,
    NotStarted,
    RecycleAsked,
    Said,
    Started,
    StopAsked,
    Tick,
)
from mayfly_reaper.settings import Budgets
from mayfly_reaper.slot import SlotRules

BUDGETS = Budgets()

RANKS = {"spawning": 0, "loading": 1, "canary": 1, "ready": 2, "draining": 3, "gone": 4}

messages: st.SearchStrategy[ToReaper] = st.one_of(
    st.just(Hello("s", 1, 1)),
    st.builds(Loading, st.sampled_from(["starting", "loading", "canary"]), st.integers(0, 3)),
    st.just(Ready("ipc:///w", ModelCard(digest="d", weight_bytes=10**9))),
    st.builds(
        Beat,
        st.sampled_from(["loading", "idle", "prefill", "decode", "stopping"]),
        progress=st.integers(0, 3),
        running=st.integers(0, 1),
        waiting=st.integers(0, 1),
    ),
    st.builds(
        Fault,
        st.just("k"),
        st.sampled_from(["request", "batch", "recycle", "worker", "machine", "model"]),
        st.builds(Cause, st.just("E"), st.sampled_from(["a", "b"])),
    ),
    st.builds(Bye, st.sampled_from([0, 3, 4, 70, 71, 75])),
)
statuses = st.sampled_from([0, 1, 3, 4, 70, 71, 75, -6, -9, -11, -15])
waits = st.sampled_from([0.0, 0.05, 0.4, 1.0, 2.9])


class SlotMachine(RuleBasedStateMachine):
    """The world around a slot: it runs what is spawned, and lets anything happen to it."""

    def __init__(self) -> None:
        super().__init__()
        self.rules = SlotRules(BUDGETS, lambda: 0.5, itertools.count(1).__next__)
        self.now = 0.0
        self.slot = self.rules.begin("s", self.now)
        self.alive: set[int] = set()
        self.killed: set[int] = set()
        self.spawned = 0
        self.last_spawn = float("-inf")
        self.by_hand = False
        self.rank = (0, 0)

    def tell(self, event: Event) -> None:
        self.slot, actions = self.rules.step(self.slot, event, self.now)
        for action in actions:
            self.do(action)
        self.by_hand = False

    def do(self, action: Action) -> None:
        match action:
            case Spawn(number):
                assert not self.alive, "two processes of one slot"
                assert number == self.spawned + 1
                assert not self.slot.stopping
                spaced = self.now - self.last_spawn >= BUDGETS.spacing_s - 1e-6
                assert spaced or self.by_hand, "a loop without back-off"
                self.spawned = number
                self.last_spawn = self.now
                self.alive.add(number)
            case Signal(number, which):
                assert number in self.alive, "a signal for nobody"
                if which == signal.SIGKILL:
                    self.killed.add(number)
            case Send(number, _):
                assert number in self.alive
            case Record(life):
                assert life.number == self.spawned
                assert life.number not in self.alive

    @rule(wait=waits)
    def time_passes(self, wait: float) -> None:
        self.now += wait
        self.tell(Tick())

    @rule(message=messages)
    @precondition(lambda self: self.alive)
    def a_worker_speaks(self, message: ToReaper) -> None:
        self.tell(Said(next(iter(self.alive)), message))

    @rule(message=messages, status=statuses, ago=st.integers(0, 3))
    @precondition(lambda self: self.spawned > 0)
    def one_that_is_over_speaks(self, message: ToReaper, status: int, ago: int) -> None:
        current = self.slot.life.number if self.slot.life is not None else self.spawned + 1
        number = current - 1 - ago
        before = self.slot
        for event in (Said(number, message), Exited(number, status), Started(number, 1)):
            after, actions = self.rules.step(self.slot, event, self.now)
            assert actions == []
            assert replace(after, late=before.late, seen_at=before.seen_at) == before
            self.slot = after
        assert self.slot.late == before.late + 1

    @rule(status=statuses)
    @precondition(lambda self: self.alive)
    def a_worker_ends(self, status: int) -> None:
        number = self.alive.pop()
        self.tell(Exited(number, status))

    @rule()
    @precondition(lambda self: self.alive and self.slot.state == "spawning")
    def a_process_is_started(self) -> None:
        self.tell(Started(next(iter(self.alive)), 4711))

    @rule()
    @precondition(lambda self: self.alive and self.slot.state == "spawning")
    def a_process_cannot_be_started(self) -> None:
        number = self.alive.pop()
        self.tell(NotStarted(number, "no memory"))

    @rule()
    def an_operator_recycles(self) -> None:
        self.by_hand = True
        self.tell(RecycleAsked())

    @rule(hurry=st.booleans(), really=st.integers(0, 9))
    def an_operator_stops(self, hurry: bool, really: int) -> None:
        if really == 0:
            self.tell(StopAsked(hurry))

    @invariant()
    def ready_means_that_it_runs(self) -> None:
        life = self.slot.life
        if self.slot.state in ("spawning", "loading", "canary", "ready", "draining"):
            assert life is not None and life.number in self.alive
        assert not self.alive or (life is not None and self.alive == {life.number})

    @invariant()
    def no_incarnation_comes_back(self) -> None:
        if self.slot.life is not None:
            rank = (self.slot.life.number, RANKS[self.slot.state])
            assert rank >= self.rank
            self.rank = rank

    @invariant()
    def something_is_due(self) -> None:
        due = self.rules.due(self.slot)
        over = self.slot.life is None and self.slot.state in ("failed", "gone")
        assert over or due < float("inf") or self.alive <= self.killed
        if self.slot.state == "gone" and self.slot.life is None:
            assert self.slot.stopping

    def teardown(self) -> None:
        """A slot is never lost: if nobody speaks any more and whoever is killed dies, it comes
        round to another worker, to FAILED, or to the end of a stop."""
        spawned = self.spawned
        for _ in range(2_000):
            if self.spawned > spawned or (
                self.slot.life is None and self.slot.state in ("failed", "gone")
            ):
                return
            self.now += min(1.0, max(0.001, self.rules.due(self.slot) - self.now))
            self.tell(Tick())
            if self.alive and self.alive <= self.killed:
                self.tell(Exited(self.alive.pop(), -signal.SIGKILL))
        raise AssertionError(f"a slot was lost: {self.slot}")


TestSlotMachine = SlotMachine.TestCase
TestSlotMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


class LosingMachine(RuleBasedStateMachine):
    """Workers that serve for a while and then fail by themselves, over and over."""

    def __init__(self) -> None:
        super().__init__()
        self.rules = SlotRules(BUDGETS, lambda: 0.5, itertools.count(1).__next__)
        self.now = 0.0
        self.slot = self.rules.begin("s", self.now)
        self.spawns: list[float] = []
        self.step(Tick())

    def step(self, event: Event) -> None:
        self.slot, actions = self.rules.step(self.slot, event, self.now)
        self.spawns += [self.now for action in actions if isinstance(action, Spawn)]

    @rule(served=st.booleans(), seconds=st.integers(0, 50), status=st.sampled_from([1, 4, 70, -11]))
    def a_worker_fails(self, served: bool, seconds: int, status: int) -> None:
        number = self.slot.incarnation
        if served:
            self.step(Said(number, Ready("ipc:///w", ModelCard(digest="d"))))
        for _ in range(seconds):
            self.now += 1
            self.step(Said(number, Beat("idle", 0)))
        self.step(Exited(number, status))
        self.now += 0.05
        self.step(Tick())
        self.now = max(self.now, self.rules.due(self.slot))
        if self.slot.state == "backoff":
            self.step(Tick())
        assert self.slot.state == "spawning"

    @invariant()
    def failures_in_a_row_get_rarer(self) -> None:
        pauses = [b - a for a, b in itertools.pairwise(self.spawns)]
        for failures, pause in enumerate(pauses):
            bound = min(BUDGETS.retry_max_s, BUDGETS.retry_s * 2.0 ** (failures - 1))
            assert pause >= (bound / 2 if failures else 0.0)


TestLosingMachine = LosingMachine.TestCase
TestLosingMachine.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)
