"""Invariants of a slot under any events in any order."""

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
from mayfly_reaper.rules.actions import (
    Action,
    AnnounceLoss,
    RecordLoss,
    SendMessage,
    SendSignal,
    Spawn,
    WipeKernels,
)
from mayfly_reaper.rules.events import (
    Event,
    MessageReceived,
    ProcessEnded,
    ProcessExited,
    ProcessStarted,
    RecycleRequested,
    SpawnAllowed,
    SpawnDeferred,
    SpawnFailed,
    StopRequested,
    Tick,
)
from mayfly_reaper.rules.slot import SlotRules
from mayfly_reaper.settings import Budgets

BUDGETS = Budgets()

RANKS = {"spawning": 0, "loading": 1, "canary": 1, "ready": 2, "draining": 3, "gone": 4}

READY = Ready("ipc:///w", ModelCard(digest="d", weight_bytes=10**9))

messages: st.SearchStrategy[ToReaper] = st.one_of(
    st.just(Hello("s", 1, 1)),
    st.builds(Loading, st.sampled_from(["starting", "loading", "canary"]), st.integers(0, 3)),
    st.just(READY),
    st.builds(
        Beat,
        st.sampled_from(["loading", "idle", "prefill", "decode", "stopping"]),
        progress=st.integers(0, 3),
        running=st.integers(0, 1),
        waiting=st.integers(0, 1),
    ),
    st.builds(
        Fault,
        st.sampled_from(["k", "cuda_compile", "metal_timeout", "cuda_capture"]),
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
        self.lost: set[int] = set()
        self.recorded: set[int] = set()
        self.spawned = 0
        self.last_spawn = float("-inf")
        self.asked: RecycleRequested | None = None
        self.held = False
        self.ranks: dict[int, int] = {}

    def apply(self, event: Event) -> None:
        self.slot, actions = self.rules.step(self.slot, event, self.now)
        for action in actions:
            self.do(action)
        self.asked = None

    def do(self, action: Action) -> None:
        match action:
            case Spawn(number):
                surge = self.asked is not None and self.asked.surge
                assert len(self.alive) <= 1, "three processes of one slot"
                assert not self.alive or surge or self.slot.predecessor is not None
                assert number == self.spawned + 1
                assert not self.slot.stopping
                spaced = self.now - self.last_spawn >= BUDGETS.spacing_s - 1e-6
                assert spaced or self.asked is not None, "a loop without back-off"
                assert not self.held, "nothing is to be started now"
                self.spawned = number
                self.last_spawn = self.now
                self.alive.add(number)
            case SendSignal(number, which):
                assert number in self.alive, "a signal for nobody"
                if which == signal.SIGKILL:
                    self.killed.add(number)
            case SendMessage(number, _):
                assert number in self.alive
            case AnnounceLoss(worker):
                assert worker.number not in self.lost, "lost twice"
                assert worker.state == "gone"
                self.lost.add(worker.number)
            case RecordLoss(worker):
                assert worker.number in self.lost - self.recorded
                assert worker.number not in self.alive
                self.recorded.add(worker.number)
            case WipeKernels():
                assert not self.alive

    def one_of_the_living(self, pick: int) -> int:
        return sorted(self.alive)[pick % len(self.alive)]

    @rule(wait=waits)
    def time_passes(self, wait: float) -> None:
        self.now += wait
        self.apply(Tick())
        if self.rules.wants_worker(self.slot, self.now):
            self.apply(SpawnAllowed())
            assert not self.rules.wants_worker(self.slot, self.now)

    @rule()
    def the_machine_grants_what_nobody_wants(self) -> None:
        if not self.rules.wants_worker(self.slot, self.now):
            before = self.slot
            self.apply(SpawnAllowed())
            assert self.slot == before

    @rule(wait=waits)
    def time_passes_while_the_machine_has_no_room(self, wait: float) -> None:
        self.now += wait
        self.held = True
        self.apply(Tick())
        self.apply(SpawnDeferred(self.now + 0.5, "no room"))
        assert not self.rules.wants_worker(self.slot, self.now)
        self.held = False

    @rule(message=messages, pick=st.integers(0, 1))
    @precondition(lambda self: self.alive)
    def a_worker_speaks(self, message: ToReaper, pick: int) -> None:
        self.apply(MessageReceived(self.one_of_the_living(pick), message))

    @rule(pick=st.integers(0, 1))
    @precondition(lambda self: self.alive)
    def a_worker_is_ready(self, pick: int) -> None:
        self.apply(MessageReceived(self.one_of_the_living(pick), READY))

    @rule(message=messages, status=statuses, ago=st.integers(0, 3))
    @precondition(lambda self: self.spawned > 0)
    def one_that_is_over_speaks(self, message: ToReaper, status: int, ago: int) -> None:
        oldest = min((worker.number for _, worker in self.slot.workers), default=self.spawned + 1)
        number = oldest - 1 - ago
        before = self.slot
        late = (
            MessageReceived(number, message),
            ProcessEnded(number),
            ProcessExited(number, status),
            ProcessStarted(number, 1),
        )
        for event in late:
            after, actions = self.rules.step(self.slot, event, self.now)
            assert actions == []
            assert (
                replace(after, late_messages=before.late_messages, seen_at=before.seen_at) == before
            )
            self.slot = after
        assert self.slot.late_messages == before.late_messages + 1

    @rule(status=statuses, pick=st.integers(0, 1))
    @precondition(lambda self: self.alive)
    def a_worker_ends(self, status: int, pick: int) -> None:
        number = self.one_of_the_living(pick)
        self.alive.remove(number)
        self.apply(ProcessEnded(number))
        self.what_serves_runs_and_what_runs_is_known()
        self.apply(ProcessExited(number, status))

    @rule()
    @precondition(lambda self: any(worker.state == "spawning" for _, worker in self.slot.workers))
    def a_process_is_started(self) -> None:
        self.apply(ProcessStarted(self.spawned, 4711))

    @rule()
    @precondition(lambda self: any(worker.state == "spawning" for _, worker in self.slot.workers))
    def a_process_cannot_be_started(self) -> None:
        self.alive.remove(self.spawned)
        self.apply(SpawnFailed(self.spawned, "no memory"))

    @rule(surge=st.booleans())
    def somebody_recycles(self, surge: bool) -> None:
        self.asked = RecycleRequested(surge)
        self.apply(self.asked)

    @rule(hurry=st.booleans(), really=st.integers(0, 9))
    def an_operator_stops(self, hurry: bool, really: int) -> None:
        if really == 0:
            self.apply(StopRequested(hurry))

    @invariant()
    def at_most_one_is_ready(self) -> None:
        ready = [worker for _, worker in self.slot.workers if worker.state == "ready"]
        assert len(ready) <= 1
        assert self.slot.successor is None or self.slot.predecessor is None

    @invariant()
    def what_serves_runs_and_what_runs_is_known(self) -> None:
        serving = {worker.number for _, worker in self.slot.workers if worker.state != "gone"}
        assert serving <= self.alive <= {worker.number for _, worker in self.slot.workers}

    @invariant()
    def no_incarnation_comes_back(self) -> None:
        for _, worker in self.slot.workers:
            assert RANKS[worker.state] >= self.ranks.get(worker.number, 0)
            self.ranks[worker.number] = RANKS[worker.state]
        assert not self.lost & {
            worker.number for _, worker in self.slot.workers if worker.state != "gone"
        }

    @invariant()
    def something_is_due(self) -> None:
        due = self.rules.due(self.slot)
        over = not self.slot.workers and self.slot.state in ("failed", "gone")
        assert over or due < float("inf") or self.alive <= self.killed
        if self.slot.state == "gone" and self.slot.current is None:
            assert self.slot.stopping

    def teardown(self) -> None:
        """A slot is never lost: if nobody speaks any more and whoever is killed dies, it comes
        round to another worker, to FAILED, or to the end of a stop."""
        spawned = self.spawned
        for _ in range(2_000):
            if self.spawned > spawned or (
                not self.slot.workers and self.slot.state in ("failed", "gone")
            ):
                return
            self.now += min(1.0, max(0.001, self.rules.due(self.slot) - self.now))
            self.time_passes(0.0)
            for number in self.alive & self.killed:
                self.alive.remove(number)
                self.apply(ProcessExited(number, -signal.SIGKILL))
        raise AssertionError(f"a slot was lost: {self.slot}")


TestSlotMachine = SlotMachine.TestCase
TestSlotMachine.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


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
        if self.rules.wants_worker(self.slot, self.now):
            self.slot, more = self.rules.step(self.slot, SpawnAllowed(), self.now)
            actions += more
        self.spawns += [self.now for action in actions if isinstance(action, Spawn)]

    @rule(served=st.booleans(), seconds=st.integers(0, 50), status=st.sampled_from([1, 4, 70, -11]))
    def a_worker_fails(self, served: bool, seconds: int, status: int) -> None:
        number = self.slot.incarnation
        if served:
            self.step(MessageReceived(number, Ready("ipc:///w", ModelCard(digest="d"))))
        for _ in range(seconds):
            self.now += 1
            self.step(MessageReceived(number, Beat("idle", 0)))
        self.step(ProcessExited(number, status))
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
