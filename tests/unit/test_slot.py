"""The slot's rules, one story at a time, without a process or a clock."""

from __future__ import annotations

import signal

import pytest

from mayfly_protocol.lifecycle import (
    Beat,
    Bye,
    Drain,
    Exit,
    Hello,
    Loading,
    ModelCard,
    Ready,
    Scope,
)
from mayfly_reaper.rules.events import (
    Ended,
    Event,
    Exited,
    NotStarted,
    RecycleAsked,
    Said,
    Started,
    StopAsked,
    Tick,
)
from mayfly_reaper.rules.incarnation import Record, Send, Signal, Spawn
from mayfly_reaper.rules.worker import LAST_WORDS_S
from support.slot_scenario import BUDGETS, IDLE, READY, Story, fault, losses


def test_a_worker_comes_up_step_by_step() -> None:
    story = Story()
    assert story.slot.state == "backoff"
    assert story.tell(Tick()) == [Spawn(1)]
    assert story.slot.state == "spawning"
    story.tell(Started(1, 4711))
    story.say(Hello("s", 1, 4711))
    assert story.slot.state == "loading"
    story.say(Loading("warming", 5, 10))
    assert story.slot.state == "loading"
    story.say(Loading("canary"))
    assert story.slot.state == "canary"
    story.say(READY)
    assert story.slot.state == "ready"
    assert story.slot.life is not None
    assert (story.slot.life.pid, story.slot.life.ready) == (4711, READY)


def test_a_first_loss_is_made_good_at_once_and_further_ones_are_not() -> None:
    story = Story().steady()
    assert story.tell(Exited(1, -signal.SIGSEGV)) == []
    assert story.slot.state == "gone"
    record, spawn = story.wait(LAST_WORDS_S)
    assert isinstance(record, Record)
    assert (record.verdict.kind, record.life.before, record.done) == (
        "crashed",
        "ready",
        "respawned at once",
    )
    assert spawn == Spawn(2)
    delays = []
    for _ in range(12):
        story.ready().wait(5, beat=IDLE)
        story.exit(-signal.SIGSEGV)
        assert story.slot.state == "backoff"
        delays.append(story.slot.retry_at - story.now)
        assert story.wait(delays[-1] - 0.01) == []
        assert story.wait(0.02)[0] == Spawn(story.slot.incarnation)
    assert delays[:4] == pytest.approx([1, 2, 4, 8])  # with the least jitter, half the bound
    assert delays[-1] == pytest.approx(BUDGETS.retry_max_s / 2)


def test_a_worker_that_held_clears_the_record() -> None:
    story = Story().ready()
    for _ in range(3):
        story.exit(70)
        story.wait(30)
        story.ready()
    assert story.slot.strikes == 3
    story.steady()
    assert Spawn(5) in story.exit(70)
    assert story.slot.strikes == 1


def test_somebodys_kill_is_not_held_against_the_slot() -> None:
    story = Story().ready()
    for incarnation in range(2, 8):
        story.wait(2, beat=IDLE)
        actions = story.exit(-signal.SIGKILL)
        assert losses(actions) == [("killed", "worker", "SIGKILL from outside")]
        assert actions[-1] == Spawn(incarnation)
        story.ready()
    assert story.slot.strikes == 0


def test_a_worker_killed_before_it_was_ready_is_not_respawned_in_a_hot_loop() -> None:
    story = Story().start()
    story.exit(-signal.SIGKILL)
    assert story.slot.state == "backoff"
    assert story.slot.retry_at >= story.now + 0.5 - LAST_WORDS_S


def test_two_spawns_are_never_closer_than_the_spacing() -> None:
    story = Story().ready()
    story.wait(0.2, beat=IDLE)
    story.exit(-signal.SIGKILL)
    assert story.slot.state == "backoff"
    assert story.slot.retry_at == pytest.approx(100 + BUDGETS.spacing_s)


def test_a_worker_is_judged_by_its_last_words_even_if_they_come_after_its_exit() -> None:
    story = Story().ready()
    story.wait(2, beat=IDLE)
    assert story.tell(Exited(1, 70)) == []
    actions = story.say(fault(text="[METAL] first"))
    assert losses(actions) == [("metal_hang", "worker", "[METAL] first")]
    assert actions[-1] == Spawn(2)


def test_what_an_earlier_incarnation_says_changes_nothing() -> None:
    story = Story().ready()
    story.wait(2, beat=IDLE)
    story.exit(-signal.SIGKILL)
    before = story.slot
    for number, message in enumerate((IDLE, READY, fault(), Bye(0), Loading("canary"))):
        assert story.tell(Said(1, message)) == []
        assert story.slot.late == number + 1
    assert story.tell(Exited(1, 3)) == []
    assert story.slot.state == before.state
    assert story.slot.life == before.life


def test_a_worker_whose_process_ended_serves_no_more_before_it_is_known_why() -> None:
    story = Story().ready()
    assert story.tell(Ended(1)) == []
    assert story.slot.state == "gone"
    assert story.lost == []
    assert losses(story.exit(-signal.SIGSEGV)) == [("crashed", "worker", "killed by SIGSEGV")]


def test_a_fault_ends_an_incarnation_before_its_exit() -> None:
    story = Story().ready()
    story.wait(2, beat=IDLE)
    assert story.say(fault()) == []
    assert story.slot.state == "gone"
    story.say(fault(text="the mask"))
    story.say(Bye(70))
    (record, _) = story.tell(Exited(1, -signal.SIGABRT))
    assert isinstance(record, Record)
    assert record.verdict.first.text == "boom"
    assert record.life.before == "ready"


@pytest.mark.parametrize("scope", ["request", "batch"])
def test_a_fault_that_the_worker_outlives_changes_nothing(scope: Scope) -> None:
    story = Story().ready()
    assert story.say(fault(scope)) == []
    assert story.slot.state == "ready"


def test_a_fault_that_wears_the_worker_out_recycles_it() -> None:
    story = Story().ready()
    assert story.say(fault("recycle")) == [Send(1, Drain(BUDGETS.drain_s))]
    assert story.slot.state == "draining"
    story.say(Bye(Exit.RECYCLED, "Resource limit exceeded"))
    assert losses(story.exit(Exit.RECYCLED)) == []
    assert story.lost == []


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([Exited(1, Exit.CONFIGURATION, "usage ...\nno such file: x")], "no such file: x"),
        ([Said(1, Bye(3, "bad adapter")), Exited(1, Exit.CONFIGURATION)], "bad adapter"),
        ([Said(1, fault("model", "no kernel")), Exited(1, 70)], "no kernel"),
        ([Said(1, fault("worker", "no kernel")), Exited(1, Exit.CONFIGURATION)], "no kernel"),
    ],
)
def test_a_configuration_that_cannot_work_fails_the_slot(events: list[Event], reason: str) -> None:
    story = Story().start()
    for event in events:
        story.tell(event)
    story.wait(3600)
    assert story.slot.state == "failed"
    assert reason in story.slot.detail
    assert story.tell(RecycleAsked()) == [Spawn(2)]


def test_a_process_that_cannot_be_started_backs_off() -> None:
    story = Story()
    story.tell(Tick())
    actions = story.tell(NotStarted(1, "Resource temporarily unavailable"))
    assert losses(actions) == [("not_started", "machine", "Resource temporarily unavailable")]
    assert story.slot.state == "backoff"
    assert story.wait(2)[0] == Spawn(2)


def test_a_recycle_loses_nothing_and_is_no_loss() -> None:
    story = Story().steady()
    assert story.tell(RecycleAsked()) == [Send(1, Drain(BUDGETS.drain_s))]
    assert story.slot.state == "draining"
    assert story.tell(RecycleAsked()) == []
    assert story.wait(10, beat=Beat("decode", 1, running=1)) == []
    story.say(Bye(Exit.RECYCLED))
    assert story.tell(Exited(1, Exit.RECYCLED)) == [Spawn(2)]
    assert story.slot.strikes == 0
    assert story.tell(RecycleAsked()) == []  # it is fresh


def test_a_worker_that_ignores_its_drain_climbs_the_ladder() -> None:
    heavy = Ready("ipc:///w", ModelCard(digest="d", weight_bytes=100 * 10**9))
    story = Story().ready(heavy)
    teardown = 100 * BUDGETS.teardown_s_per_gb
    story.tell(RecycleAsked())
    assert story.wait(BUDGETS.drain_s + BUDGETS.leave_s + teardown - 0.1, beat=IDLE) == []
    assert story.wait(0.2, beat=IDLE) == [Signal(1, signal.SIGTERM)]
    assert story.wait(BUDGETS.terminate_s + teardown - 0.2, beat=IDLE) == []
    assert story.wait(0.3, beat=IDLE) == [Signal(1, signal.SIGUSR2)]
    assert story.wait(BUDGETS.stacks_s, beat=IDLE) == [Signal(1, signal.SIGKILL)]
    assert [kind for kind, _, _ in losses(story.exit(-signal.SIGKILL))] == ["wedged"]


def test_a_worker_that_says_bye_and_stays_is_killed() -> None:
    story = Story().ready()
    story.say(Bye(70))
    assert story.slot.state == "gone"
    actions = story.wait(BUDGETS.leave_s + BUDGETS.stacks_s)
    assert actions == [Signal(1, signal.SIGUSR2), Signal(1, signal.SIGKILL)]
    assert [kind for kind, _, _ in losses(story.exit(-signal.SIGKILL))] == ["wedged"]


def test_a_worker_that_keeps_recycling_itself_before_it_serves_backs_off() -> None:
    story = Story().start()
    assert losses(story.exit(Exit.RECYCLED)) == []
    assert (story.slot.state, story.slot.strikes) == ("backoff", 1)


def test_a_stop_drains_those_that_serve() -> None:
    story = Story().ready()
    assert story.tell(StopAsked()) == [Send(1, Drain(BUDGETS.stop_s))]
    assert story.exit(Exit.BYE) == []
    assert (story.slot.state, story.slot.life) == ("gone", None)
    assert story.wait(3600) == []
    assert story.tell(RecycleAsked()) == []


def test_a_stop_shortens_a_drain() -> None:
    story = Story().ready()
    story.tell(RecycleAsked())
    assert story.tell(StopAsked()) == [Send(1, Drain(BUDGETS.stop_s))]
    actions = story.wait(BUDGETS.stop_s + BUDGETS.leave_s, beat=IDLE)
    assert actions == [Signal(1, signal.SIGTERM)]


def test_a_stop_ends_those_that_load() -> None:
    story = Story().start()
    assert story.tell(StopAsked()) == [Signal(1, signal.SIGTERM)]
    story.say(Hello("s", 1, 4711))
    story.say(READY)
    assert story.slot.state == "gone"
    assert story.wait(BUDGETS.terminate_s) == [Signal(1, signal.SIGKILL)]
    assert story.exit(-signal.SIGKILL) == []
    assert story.slot.life is None


def test_a_stop_in_backoff_or_failure_is_over_at_once() -> None:
    story = Story().start()
    story.exit(Exit.CONFIGURATION)
    story.tell(StopAsked())
    assert (story.slot.state, story.slot.life) == ("gone", None)
    assert story.wait(3600) == []


def test_a_hurried_stop_kills() -> None:
    story = Story().ready()
    story.tell(StopAsked())
    assert story.tell(StopAsked(hurry=True)) == [Signal(1, signal.SIGKILL)]
    assert story.exit(-signal.SIGKILL) == []
    assert story.slot.life is None
