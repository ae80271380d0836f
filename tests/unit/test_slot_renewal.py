"""How a worker that nothing is wrong with is replaced."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from mayfly_protocol.counters import Memory
from mayfly_protocol.lifecycle import Beat, Drain, Exit
from mayfly_reaper.rules.events import Exited, NotStarted, RecycleAsked, StopAsked
from mayfly_reaper.rules.incarnation import Incarnation, Record, Send, Signal, Spawn
from mayfly_reaper.rules.recycle import Renewal, next_renewal, worn
from mayfly_reaper.rules.slot import Slot
from mayfly_reaper.settings import Lifetime
from support.slot_scenario import BUDGETS, IDLE, READY, Story, fault

BUSY = Beat("decode", 1, running=1)
DRAIN = Drain(BUDGETS.drain_s)


def surging() -> Story:
    story = Story().steady()
    assert story.tell(RecycleAsked(surge=True, reason="worn")) == [Spawn(2)]
    return story


def state_of(story: Story, number: int) -> str | None:
    return next((life.state for _, life in story.slot.lives if life.number == number), None)


def test_a_surge_has_one_that_serves_at_any_time() -> None:
    story = surging()
    assert (state_of(story, 1), state_of(story, 2)) == ("ready", "spawning")
    story.say(IDLE, 1)
    assert story.slot.detail == "worn"
    assert story.say(READY, 2) == [Send(1, DRAIN)]
    assert (state_of(story, 1), state_of(story, 2)) == ("draining", "ready")
    assert story.slot.incarnation == 2
    assert story.slot.renewing
    assert story.tell(Exited(1, Exit.RECYCLED)) == []
    assert story.wait(1, beat=IDLE) == []
    assert [role for role, _ in story.slot.lives] == ["life"]
    assert not story.slot.renewing
    assert (story.lost, story.slot.strikes, story.slot.detail) == ([], 0, "")


def test_only_one_worker_is_replaced_at_a_time() -> None:
    story = surging()
    assert story.tell(RecycleAsked(surge=True)) == []
    assert story.tell(RecycleAsked()) == []
    story.say(READY, 2)
    assert story.tell(RecycleAsked(surge=True)) == []


def test_a_worn_worker_serves_on_if_its_successor_fails() -> None:
    story = surging()
    (record,) = story.tell(Exited(2, -signal.SIGSEGV)) + story.wait(0.05, beat=IDLE)
    assert isinstance(record, Record)
    assert record.done == "the worker before it serves on; again in 0.5 s"
    assert state_of(story, 1) == "ready"
    assert not story.slot.renewing
    assert story.slot.renew_at == pytest.approx(story.now + 0.5)
    story.tell(RecycleAsked(surge=True))
    story.tell(NotStarted(3, "no memory"))
    assert story.slot.failed_renewals == 2
    story.tell(RecycleAsked(surge=True))
    story.say(READY, 4)
    assert (state_of(story, 4), story.slot.failed_renewals) == ("ready", 0)


@pytest.mark.parametrize(("kind", "cramped"), [("cuda_out_of_memory", True), ("shape", False)])
def test_it_is_remembered_that_two_do_not_fit(kind: str, cramped: bool) -> None:
    story = surging()
    story.say(fault(kind=kind), 2)
    story.tell(Exited(2, 70))
    assert story.slot.cramped == cramped


def test_a_successor_takes_the_place_of_a_worker_that_fails_first() -> None:
    story = surging()
    story.say(fault(), 1)
    assert (state_of(story, 1), state_of(story, 2)) == ("gone", "spawning")
    (record,) = story.tell(Exited(1, 70))
    assert isinstance(record, Record)
    assert record.done == "its successor, already on its way, takes its place"
    assert (story.slot.state, story.slot.incarnation) == ("spawning", 2)
    assert story.say(READY, 2) == []
    assert story.slot.state == "ready"


def test_a_successor_that_is_ready_leaves_one_that_is_dying_alone() -> None:
    story = surging()
    story.say(fault(), 1)
    assert story.say(READY, 2) == []
    assert (state_of(story, 1), state_of(story, 2)) == ("gone", "ready")
    (record,) = story.tell(Exited(1, 70))
    assert isinstance(record, Record)
    assert record.done == "nothing: its successor serves"


def test_a_predecessor_that_overstays_is_killed_and_its_successor_is_not_disturbed() -> None:
    story = surging()
    story.say(READY, 2)
    actions = story.wait(60, beat=BUSY)
    assert [a.number for a in actions if isinstance(a, Signal)] == [
        signal.SIGTERM,
        signal.SIGUSR2,
        signal.SIGKILL,
    ]
    (record,) = story.tell(Exited(1, -signal.SIGKILL)) + story.wait(0.05, beat=BUSY)
    assert isinstance(record, Record)
    assert record.verdict.kind == "wedged"
    assert (story.slot.state, story.slot.strikes) == ("ready", 0)


def test_one_that_is_lost_beside_its_predecessor_is_respawned() -> None:
    story = surging()
    story.say(READY, 2)
    story.wait(2, beat=IDLE)
    actions = story.tell(Exited(2, -signal.SIGKILL)) + story.wait(0.05)
    assert actions[-1] == Spawn(3)
    assert (state_of(story, 1), state_of(story, 3)) == ("draining", "spawning")


def test_a_stop_in_the_middle_of_a_surge_ends_both() -> None:
    story = surging()
    assert story.tell(StopAsked(grace_s=12)) == [Send(1, Drain(12)), Signal(2, signal.SIGTERM)]
    story.tell(Exited(2, -signal.SIGTERM))
    story.tell(Exited(1, Exit.BYE))
    assert story.wait(1) == []
    assert (story.slot.lives, story.slot.state) == ([], "gone")


def test_a_replacement_in_place_is_over_when_the_next_is_ready() -> None:
    story = Story().steady()
    story.tell(RecycleAsked(reason="worn"))
    assert (story.slot.state, story.slot.detail) == ("draining", "worn")
    assert story.exit(Exit.RECYCLED) == [Spawn(2)]
    assert story.slot.renewing
    story.ready()
    assert not story.slot.renewing


def test_a_replacement_in_place_that_fails_does_not_block_the_pool() -> None:
    story = Story().steady()
    story.tell(RecycleAsked())
    story.exit(Exit.RECYCLED)
    story.exit(Exit.LOAD_FAILED)
    assert (story.slot.state, story.slot.renewing) == ("backoff", False)


# -- wear ------------------------------------------------------------------------------------


def life(beat: Beat, share: float = 0.5, now: float = 0.0) -> Incarnation:
    return Incarnation(1, now, now, now, state="ready", beat=beat, share=share)


@pytest.mark.parametrize(
    ("share", "inferences", "reason"),
    [
        (0.5, 99, None),
        (0.5, 100, "worn: 100 inferences"),
        (0.0, 90, "worn: 90 inferences"),
        (0.0, 89, None),
        (0.999, 109, None),
        (0.999, 110, "worn: 110 inferences"),
    ],
)
def test_workers_that_started_together_do_not_go_together(
    share: float, inferences: int, reason: str | None
) -> None:
    found = worn(
        life(Beat("idle", 1, inferences=inferences), share), Lifetime(max_inferences=100), 0.0
    )
    assert (found.reason if found else None) == reason


def test_what_wears_out() -> None:
    lifetime = Lifetime(max_inferences=0, max_age_s=100, max_footprint=1000)
    small = life(Beat("idle", 1, inferences=10**9, memory=Memory(footprint=999)))
    assert worn(small, lifetime, 99.0) is None
    aged = worn(small, lifetime, 100.0)
    assert aged is not None
    assert (aged.reason, aged.overdue) == ("worn: 100 seconds", False)
    old = worn(small, lifetime, 200.0)
    assert old is not None
    assert old.overdue
    grown = worn(life(Beat("idle", 1, memory=Memory(footprint=1200))), lifetime, 0.0)
    assert grown is not None
    assert (grown.reason, grown.overdue) == ("worn: 1200 bytes of memory", True)
    assert worn(life(IDLE), Lifetime(), 1e9) is None
    assert worn(replace(life(IDLE), beat=None), lifetime, 1e9) is None


# -- which one, and how ----------------------------------------------------------------------

TEN = Lifetime(max_inferences=10)
PLENTY = 10**12


def slot(name: str, beat: Beat, now: float = 0.0, **fields: object) -> Slot:
    return Slot(name, now, life=life(beat), incarnation=1, **fields)  # type: ignore[arg-type]


def used(inferences: int, *, busy: bool = False, **memory: int) -> Beat:
    held = Memory(**{"footprint": 1000, **memory})
    if busy:
        return Beat("decode", 1, running=1, inferences=inferences, memory=held)
    return Beat("idle", 1, inferences=inferences, memory=held)


def planned(*slots: Slot, room: int = PLENTY, asked: tuple[str, ...] = ()) -> Renewal | None:
    return next_renewal(slots, TEN, asked, lambda: room, spacing_s=1.0, now=100.0)


def test_nothing_is_replaced_that_is_not_worn() -> None:
    assert planned(slot("a", used(9)), slot("b", used(9))) is None


def test_a_worn_worker_is_replaced_with_a_surge_where_there_is_room() -> None:
    busy = slot("b", used(11, busy=True))
    assert planned(slot("a", used(9)), busy) == Renewal(
        "b", True, "worn: 11 inferences", "inferences"
    )
    assert planned(busy, room=1200) == Renewal("b", True, "worn: 11 inferences", "inferences")
    assert planned(busy, room=1199) is None
    assert planned(replace(busy, cramped=True)) is None


def test_without_room_it_is_replaced_when_it_is_idle_or_overdue() -> None:
    assert planned(slot("a", used(11)), room=0) == Renewal(
        "a", False, "worn: 11 inferences", "inferences"
    )
    overdue = slot("a", used(20, busy=True))
    assert planned(overdue, room=0) == Renewal("a", False, "worn: 20 inferences", "inferences")
    waiting = Beat("idle", 1, waiting=1, inferences=11, memory=Memory(footprint=1))
    assert planned(slot("a", waiting), room=0) is None


def test_a_device_with_memory_of_its_own_must_have_room_too() -> None:
    full = used(11, busy=True, active=100, cache=20, device_free=143)
    assert planned(slot("a", full)) is None
    free = used(11, busy=True, active=100, cache=20, device_free=144)
    assert planned(slot("a", free)) == Renewal("a", True, "worn: 11 inferences", "inferences")


def test_one_of_a_pool_at_a_time() -> None:
    worn_out = slot("a", used(11))
    assert planned(worn_out, slot("b", used(0), renewing=True)) is None
    assert planned(worn_out, slot("b", used(0), stopping=True)) is None


def test_who_was_asked_for_goes_first_and_whether_it_is_worn_or_not() -> None:
    slots = slot("a", used(30)), slot("b", used(0, busy=True))
    assert planned(*slots, asked=("b",)) == Renewal("b", True, "somebody asked for it")
    assert planned(*slots, asked=("b",), room=0) == Renewal("b", False, "somebody asked for it")


def test_an_overdue_worker_goes_before_one_that_is_only_worn() -> None:
    slots = slot("a", used(11)), slot("b", used(30))
    assert planned(*slots) == Renewal("b", True, "worn: 30 inferences", "inferences")


def test_a_replacement_that_failed_is_not_tried_again_at_once() -> None:
    assert planned(slot("a", used(11), renew_at=100.1)) is None
    assert planned(slot("a", used(11), renew_at=100.0)) is not None


def test_what_is_planned_is_told() -> None:
    assert Renewal("a", True, "worn: 3 inferences", "inferences").text == (
        "a: the worker is replaced (worn: 3 inferences), its successor is loaded first"
    )
