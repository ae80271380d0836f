"""Replacement of a healthy worker."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from mayfly_protocol.counters import Memory
from mayfly_protocol.lifecycle import Beat, Drain, Exit
from mayfly_reaper.rules.actions import RecordLoss, SendMessage, SendSignal, Spawn
from mayfly_reaper.rules.events import ProcessExited, RecycleRequested, SpawnFailed, StopRequested
from mayfly_reaper.rules.incarnation import Incarnation
from mayfly_reaper.rules.recycle import PlannedRecycle, next_recycle, recycle_due
from mayfly_reaper.rules.slot import Slot
from mayfly_reaper.settings import Lifetime
from support.slot_scenario import BUDGETS, IDLE, READY, Scenario, fault

BUSY = Beat("decode", 1, running=1)
DRAIN = Drain(BUDGETS.drain_s)


def surging() -> Scenario:
    scenario = Scenario().steady()
    assert scenario.apply(RecycleRequested(surge=True, reason="due")) == [Spawn(2)]
    return scenario


def state_of(scenario: Scenario, number: int) -> str | None:
    return next(
        (worker.state for _, worker in scenario.slot.workers if worker.number == number), None
    )


def test_a_surge_has_one_that_serves_at_any_time() -> None:
    scenario = surging()
    assert (state_of(scenario, 1), state_of(scenario, 2)) == ("ready", "spawning")
    scenario.receive(IDLE, 1)
    assert scenario.slot.detail == "due"
    assert scenario.receive(READY, 2) == [SendMessage(1, DRAIN)]
    assert (state_of(scenario, 1), state_of(scenario, 2)) == ("draining", "ready")
    assert scenario.slot.incarnation == 2
    assert scenario.slot.recycling
    assert scenario.apply(ProcessExited(1, Exit.RECYCLED)) == []
    assert scenario.wait(1, beat=IDLE) == []
    assert [role for role, _ in scenario.slot.workers] == ["current"]
    assert not scenario.slot.recycling
    assert (scenario.lost, scenario.slot.losses_in_a_row, scenario.slot.detail) == ([], 0, "")


def test_only_one_worker_is_replaced_at_a_time() -> None:
    scenario = surging()
    assert scenario.apply(RecycleRequested(surge=True)) == []
    assert scenario.apply(RecycleRequested()) == []
    scenario.receive(READY, 2)
    assert scenario.apply(RecycleRequested(surge=True)) == []


def test_a_worker_that_is_due_serves_on_if_its_successor_fails() -> None:
    scenario = surging()
    (record,) = scenario.apply(ProcessExited(2, -signal.SIGSEGV)) + scenario.wait(0.05, beat=IDLE)
    assert isinstance(record, RecordLoss)
    assert record.done == "the worker that it was to replace serves on; next try in 0.5 s"
    assert state_of(scenario, 1) == "ready"
    assert not scenario.slot.recycling
    assert scenario.slot.recycle_not_before == pytest.approx(scenario.now + 0.5)
    scenario.apply(RecycleRequested(surge=True))
    scenario.apply(SpawnFailed(3, "no memory"))
    assert scenario.slot.failed_recycles == 2
    scenario.apply(RecycleRequested(surge=True))
    scenario.receive(READY, 4)
    assert (state_of(scenario, 4), scenario.slot.failed_recycles) == ("ready", 0)


@pytest.mark.parametrize(
    ("kind", "no_room_for_surge"), [("cuda_out_of_memory", True), ("shape", False)]
)
def test_it_is_remembered_that_two_do_not_fit(kind: str, no_room_for_surge: bool) -> None:
    scenario = surging()
    scenario.receive(fault(kind=kind), 2)
    scenario.apply(ProcessExited(2, 70))
    assert scenario.slot.no_room_for_surge == no_room_for_surge


def test_a_successor_takes_the_place_of_a_worker_that_fails_first() -> None:
    scenario = surging()
    scenario.receive(fault(), 1)
    assert (state_of(scenario, 1), state_of(scenario, 2)) == ("gone", "spawning")
    (record,) = scenario.apply(ProcessExited(1, 70))
    assert isinstance(record, RecordLoss)
    assert record.done == "its successor, already on its way, takes its place"
    assert (scenario.slot.state, scenario.slot.incarnation) == ("spawning", 2)
    assert scenario.receive(READY, 2) == []
    assert scenario.slot.state == "ready"


def test_a_successor_that_is_ready_leaves_one_that_is_dying_alone() -> None:
    scenario = surging()
    scenario.receive(fault(), 1)
    assert scenario.receive(READY, 2) == []
    assert (state_of(scenario, 1), state_of(scenario, 2)) == ("gone", "ready")
    (record,) = scenario.apply(ProcessExited(1, 70))
    assert isinstance(record, RecordLoss)
    assert record.done == "not replaced: its successor serves"


def test_a_predecessor_that_overstays_is_killed_and_its_successor_is_not_disturbed() -> None:
    scenario = surging()
    scenario.receive(READY, 2)
    actions = scenario.wait(60, beat=BUSY)
    assert [a.number for a in actions if isinstance(a, SendSignal)] == [
        signal.SIGTERM,
        signal.SIGUSR2,
        signal.SIGKILL,
    ]
    (record,) = scenario.apply(ProcessExited(1, -signal.SIGKILL)) + scenario.wait(0.05, beat=BUSY)
    assert isinstance(record, RecordLoss)
    assert record.verdict.kind == "wedged"
    assert (scenario.slot.state, scenario.slot.losses_in_a_row) == ("ready", 0)


def test_one_that_is_lost_beside_its_predecessor_is_respawned() -> None:
    scenario = surging()
    scenario.receive(READY, 2)
    scenario.wait(2, beat=IDLE)
    actions = scenario.apply(ProcessExited(2, -signal.SIGKILL)) + scenario.wait(0.05)
    assert actions[-1] == Spawn(3)
    assert (state_of(scenario, 1), state_of(scenario, 3)) == ("draining", "spawning")


def test_a_stop_in_the_middle_of_a_surge_ends_both() -> None:
    scenario = surging()
    assert scenario.apply(StopRequested(grace_s=12)) == [
        SendMessage(1, Drain(12)),
        SendSignal(2, signal.SIGTERM),
    ]
    scenario.apply(ProcessExited(2, -signal.SIGTERM))
    scenario.apply(ProcessExited(1, Exit.BYE))
    assert scenario.wait(1) == []
    assert (scenario.slot.workers, scenario.slot.state) == ([], "gone")


def test_a_replacement_in_place_is_over_when_the_next_is_ready() -> None:
    scenario = Scenario().steady()
    scenario.apply(RecycleRequested(reason="due"))
    assert (scenario.slot.state, scenario.slot.detail) == ("draining", "due")
    assert scenario.exit(Exit.RECYCLED) == [Spawn(2)]
    assert scenario.slot.recycling
    scenario.ready()
    assert not scenario.slot.recycling


def test_a_replacement_in_place_that_fails_does_not_block_the_pool() -> None:
    scenario = Scenario().steady()
    scenario.apply(RecycleRequested())
    scenario.exit(Exit.RECYCLED)
    scenario.exit(Exit.LOAD_FAILED)
    assert (scenario.slot.state, scenario.slot.recycling) == ("backoff", False)


# -- wear ------------------------------------------------------------------------------------


def worker(beat: Beat, jitter: float = 0.5, now: float = 0.0) -> Incarnation:
    return Incarnation(1, now, now, now, state="ready", beat=beat, recycle_jitter=jitter)


@pytest.mark.parametrize(
    ("jitter", "inferences", "reason"),
    [
        (0.5, 99, None),
        (0.5, 100, "recycle due: 100 inferences"),
        (0.0, 90, "recycle due: 90 inferences"),
        (0.0, 89, None),
        (0.999, 109, None),
        (0.999, 110, "recycle due: 110 inferences"),
    ],
)
def test_workers_that_started_together_do_not_go_together(
    jitter: float, inferences: int, reason: str | None
) -> None:
    found = recycle_due(
        worker(Beat("idle", 1, inferences=inferences), jitter), Lifetime(max_inferences=100), 0.0
    )
    assert (found.reason if found else None) == reason


def test_what_wears_out() -> None:
    lifetime = Lifetime(max_inferences=0, max_age_s=100, max_footprint=1000)
    small = worker(Beat("idle", 1, inferences=10**9, memory=Memory(footprint=999)))
    assert recycle_due(small, lifetime, 99.0) is None
    aged = recycle_due(small, lifetime, 100.0)
    assert aged is not None
    assert (aged.reason, aged.overdue) == ("recycle due: 100 seconds", False)
    old = recycle_due(small, lifetime, 200.0)
    assert old is not None
    assert old.overdue
    grown = recycle_due(worker(Beat("idle", 1, memory=Memory(footprint=1200))), lifetime, 0.0)
    assert grown is not None
    assert (grown.reason, grown.overdue) == ("recycle due: 1200 bytes of memory", True)
    assert recycle_due(worker(IDLE), Lifetime(), 1e9) is None
    assert recycle_due(replace(worker(IDLE), beat=None), lifetime, 1e9) is None


# -- which one, and how ----------------------------------------------------------------------

TEN = Lifetime(max_inferences=10)
PLENTY = 10**12


def slot(name: str, beat: Beat, now: float = 0.0, **fields: object) -> Slot:
    return Slot(name, now, current=worker(beat), incarnation=1, **fields)  # type: ignore[arg-type]


def used(inferences: int, *, busy: bool = False, **memory: int) -> Beat:
    held = Memory(**{"footprint": 1000, **memory})
    if busy:
        return Beat("decode", 1, running=1, inferences=inferences, memory=held)
    return Beat("idle", 1, inferences=inferences, memory=held)


def planned(*slots: Slot, room: int = PLENTY, asked: tuple[str, ...] = ()) -> PlannedRecycle | None:
    return next_recycle(slots, TEN, asked, lambda: room, spacing_s=1.0, now=100.0)


def test_nothing_is_replaced_that_is_not_due() -> None:
    assert planned(slot("a", used(9)), slot("b", used(9))) is None


def test_a_worker_that_is_due_is_replaced_with_a_surge_where_there_is_room() -> None:
    busy = slot("b", used(11, busy=True))
    assert planned(slot("a", used(9)), busy) == PlannedRecycle(
        "b", True, "recycle due: 11 inferences", "inferences"
    )
    assert planned(busy, room=1200) == PlannedRecycle(
        "b", True, "recycle due: 11 inferences", "inferences"
    )
    assert planned(busy, room=1199) is None
    assert planned(replace(busy, no_room_for_surge=True)) is None


def test_without_room_it_is_replaced_when_it_is_idle_or_overdue() -> None:
    assert planned(slot("a", used(11)), room=0) == PlannedRecycle(
        "a", False, "recycle due: 11 inferences", "inferences"
    )
    overdue = slot("a", used(20, busy=True))
    assert planned(overdue, room=0) == PlannedRecycle(
        "a", False, "recycle due: 20 inferences", "inferences"
    )
    waiting = Beat("idle", 1, waiting=1, inferences=11, memory=Memory(footprint=1))
    assert planned(slot("a", waiting), room=0) is None


def test_a_device_with_memory_of_its_own_must_have_room_too() -> None:
    full = used(11, busy=True, active=100, cache=20, device_free=143)
    assert planned(slot("a", full)) is None
    free = used(11, busy=True, active=100, cache=20, device_free=144)
    assert planned(slot("a", free)) == PlannedRecycle(
        "a", True, "recycle due: 11 inferences", "inferences"
    )


def test_one_of_a_pool_at_a_time() -> None:
    due = slot("a", used(11))
    assert planned(due, slot("b", used(0), recycling=True)) is None
    assert planned(due, slot("b", used(0), stopping=True)) is None


def test_who_was_asked_for_goes_first_and_whether_it_is_due_or_not() -> None:
    slots = slot("a", used(30)), slot("b", used(0, busy=True))
    assert planned(*slots, asked=("b",)) == PlannedRecycle("b", True, "somebody asked for it")
    assert planned(*slots, asked=("b",), room=0) == PlannedRecycle(
        "b", False, "somebody asked for it"
    )


def test_an_overdue_worker_goes_before_one_that_is_only_due() -> None:
    slots = slot("a", used(11)), slot("b", used(30))
    assert planned(*slots) == PlannedRecycle("b", True, "recycle due: 30 inferences", "inferences")


def test_a_replacement_that_failed_is_not_tried_again_at_once() -> None:
    assert planned(slot("a", used(11), recycle_not_before=100.1)) is None
    assert planned(slot("a", used(11), recycle_not_before=100.0)) is not None


def test_what_is_planned_is_told() -> None:
    assert PlannedRecycle("a", True, "recycle due: 3 inferences", "inferences").text(7) == (
        "worker 7 of slot a is replaced (recycle due: 3 inferences): its successor is loaded first"
    )
