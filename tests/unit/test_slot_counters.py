"""A slot's totals over the lives of its workers."""

from __future__ import annotations

import itertools
import signal
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mayfly_protocol.common.histogram import Distribution
from mayfly_protocol.counters import WorkerCounters
from mayfly_protocol.lifecycle import Beat, Bye, Exit, Hello, Scope
from mayfly_reaper.rules.events import (
    Event,
    MessageReceived,
    ProcessExited,
    ProcessStarted,
    RecycleRequested,
    SpawnAllowed,
    SpawnFailed,
    StopRequested,
    Tick,
)
from mayfly_reaper.rules.slot import Slot, SlotRules
from mayfly_reaper.rules.worker import LAST_MESSAGES_S
from mayfly_reaper.slot_counters import RESTART_REASONS, SlotCounters, WorkerTotals, count_step
from support.slot_scenario import BUDGETS, IDLE, READY, fault


class CountedSlot:
    """A slot whose steps are counted."""

    def __init__(self) -> None:
        self.rules = SlotRules(BUDGETS, lambda: 0.0, itertools.count(1).__next__)
        self.now = 100.0
        self.slot: Slot = self.rules.begin("s", self.now)
        self.counters = SlotCounters()

    def apply(self, event: Event) -> None:
        before = self.slot
        self.slot, actions = self.rules.step(before, event, self.now)
        self.counters = count_step(self.counters, before, event, self.slot, actions, self.now)

    def receive(self, message: Any, number: int | None = None) -> None:
        self.apply(MessageReceived(number or self.slot.incarnation, message))

    def serve(self, load_s: float = 0.0) -> None:
        """Brings a worker to READY, when the slot may have one."""
        self.now = max(self.now, self.slot.retry_at)
        self.apply(SpawnAllowed())
        self.apply(ProcessStarted(self.slot.incarnation, 4711))
        self.receive(Hello("s", self.slot.incarnation, 4711))
        self.now += load_s
        self.receive(READY)
        self.receive(IDLE)
        assert self.slot.state == "ready"

    def exit(self, status: int) -> None:
        self.apply(ProcessExited(self.slot.incarnation, status))
        self.now += LAST_MESSAGES_S
        self.apply(Tick())


def beat(inferences: int, tokens: int = 0) -> Beat:
    return replace(IDLE, inferences=inferences, generated_tokens=tokens)


def test_a_successor_counts_on() -> None:
    counted = CountedSlot()
    counted.serve()
    counted.receive(beat(7, 100))
    counted.exit(-signal.SIGKILL)
    assert counted.counters.total.inferences == 7
    counted.serve()
    counted.receive(beat(2, 5))
    assert counted.counters.total == WorkerCounters(inferences=9, generated_tokens=105)
    assert (counted.counters.starts, counted.counters.restarts) == (2, {"lost": 1})
    assert counted.counters.faults == {("killed", "worker"): 1}


def test_two_workers_of_a_slot_count_apart() -> None:
    counted = CountedSlot()
    counted.serve()
    counted.receive(beat(7))
    counted.apply(RecycleRequested(surge=True, reason="worn", cause="inferences"))
    counted.receive(beat(8), 1)
    counted.receive(Hello("s", 2, 4712), 2)
    counted.receive(READY, 2)
    counted.receive(beat(1), 2)
    counted.receive(beat(9), 1)
    assert counted.counters.total.inferences == 10
    counted.apply(ProcessExited(1, 0))
    counted.now += LAST_MESSAGES_S
    counted.apply(Tick())
    assert counted.counters.total.inferences == 10
    assert counted.counters.restarts == {"inferences": 1}
    assert counted.counters.faults == {}


def test_what_comes_late_does_not_count() -> None:
    counted = CountedSlot()
    counted.serve()
    counted.exit(-signal.SIGKILL)
    heard = counted.counters.messages
    counted.receive(beat(5), 1)
    assert counted.counters.total.inferences == 0
    assert (counted.counters.messages, counted.slot.late_messages) == (heard + 1, 1)


def test_a_count_that_falls_begins_anew() -> None:
    reading = (
        WorkerTotals().updated(WorkerCounters(inferences=5)).updated(WorkerCounters(inferences=2))
    )
    assert reading.total.inferences == 7
    assert reading.updated(WorkerCounters(inferences=3)).total.inferences == 8


@pytest.mark.parametrize(
    ("scope", "reason"), [("batch", "faults"), ("recycle", "faults"), ("worker", "lost")]
)
def test_why_a_worker_went_after_a_fault(scope: Scope, reason: str) -> None:
    counted = CountedSlot()
    counted.serve()
    for _ in range(BUDGETS.batch_faults):
        counted.receive(fault(scope, kind="shape"))
    counted.receive(Bye(Exit.RECYCLED if scope != "worker" else Exit.POISONED))
    counted.exit(Exit.RECYCLED if scope != "worker" else Exit.POISONED)
    assert counted.counters.restarts == {reason: 1}
    assert sum(counted.counters.faults.values()) == (1 if scope == "worker" else 2)


def test_why_a_worker_went_that_nothing_was_wrong_with() -> None:
    counted = CountedSlot()
    for asked in ("asked", "age", "memory"):
        counted.serve()
        counted.apply(RecycleRequested(cause=asked))  # type: ignore[arg-type]
        counted.exit(Exit.BYE)
    counted.serve()
    counted.exit(Exit.RECYCLED)
    assert counted.counters.restarts == {"asked": 1, "age": 1, "memory": 1, "left": 1}
    assert counted.counters.restarts.keys() <= set(RESTART_REASONS)


def test_the_end_of_the_node_is_no_restart() -> None:
    counted = CountedSlot()
    counted.serve()
    counted.apply(StopRequested())
    counted.exit(Exit.BYE)
    assert (counted.counters.starts, counted.counters.restarts) == (1, {})


def test_a_kind_that_nobody_knows_is_other() -> None:
    counted = CountedSlot()
    counted.serve()
    counted.receive(fault("worker", kind="Tell me a story"))
    assert counted.counters.faults == {("other", "worker"): 1}


def test_loads_and_recoveries_are_timed() -> None:
    counted = CountedSlot()
    counted.serve(load_s=3.0)
    assert (counted.counters.loads.count, counted.counters.loads.sum) == (1, pytest.approx(3.0))
    counted.exit(-signal.SIGSEGV)
    lost_at = counted.now
    counted.now += 0.5
    counted.serve(load_s=4.0)
    assert counted.counters.recoveries.count == 1
    assert counted.counters.recoveries.sum == pytest.approx(counted.now - lost_at)
    counted.apply(Tick())
    assert counted.counters.recoveries.count == 1


def test_a_worker_that_could_not_be_started_was_started() -> None:
    counted = CountedSlot()
    counted.apply(SpawnAllowed())
    counted.apply(SpawnFailed(1, "no memory"))
    assert (counted.counters.starts, counted.counters.restarts) == (1, {"lost": 1})


counts = st.builds(
    Beat,
    st.just("idle"),
    st.just(0),
    inferences=st.integers(0, 9),
    generated_tokens=st.integers(0, 9),
    decode_s=st.builds(Distribution, st.tuples(st.integers(0, 3), st.integers(0, 3))),
)
happenings = st.one_of(
    counts,
    st.sampled_from(["kill", "crash", "recycle", "surge", "leave", "late", "wait"]),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(happenings, max_size=40))
def test_no_total_ever_falls(happened: list[Any]) -> None:
    """And each is the sum of what every worker counted, whatever becomes of them."""
    counted = CountedSlot()
    counted.serve()
    added: dict[int, WorkerCounters] = {}
    for what in happened:
        last = counted.counters.total
        match what:
            case Beat():
                for number in [worker.number for _, worker in counted.slot.workers]:
                    so_far = added.get(number, WorkerCounters()).plus(what.totals())
                    added[number] = so_far
                    counted.receive(_as_beat(so_far), number)
            case "kill" | "crash" | "leave":
                status = {"kill": -9, "crash": -11, "leave": Exit.RECYCLED}[what]
                if counted.slot.current is not None:
                    counted.exit(status)
            case "recycle" | "surge":
                counted.apply(RecycleRequested(surge=what == "surge"))
            case "late":
                counted.receive(replace(IDLE, inferences=1000), 1_000_000)
            case "wait":
                if counted.slot.current is None:
                    counted.serve()
        assert not counted.counters.total.fell_from(last)
    everything = WorkerCounters()
    for each in added.values():
        everything = everything.plus(each)
    assert not everything.fell_from(counted.counters.total)
    assert not counted.counters.total.fell_from(everything)
    ended = sum(counted.counters.restarts.values())
    assert counted.counters.starts == ended + len(counted.slot.workers)


def _as_beat(counts: WorkerCounters) -> Beat:
    return replace(
        IDLE,
        inferences=counts.inferences,
        generated_tokens=counts.generated_tokens,
        decode_s=counts.decode_s,
    )
