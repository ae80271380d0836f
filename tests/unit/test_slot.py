"""The slot's rules, one scenario at a time, without a process or a clock."""

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
from mayfly_reaper.rules.actions import RecordLoss, SendMessage, SendSignal, Spawn
from mayfly_reaper.rules.events import (
    Event,
    MessageReceived,
    ProcessEnded,
    ProcessExited,
    ProcessStarted,
    RecycleRequested,
    SpawnFailed,
    StopRequested,
    Tick,
)
from mayfly_reaper.rules.worker import LAST_MESSAGES_S
from support.slot_scenario import BUDGETS, IDLE, READY, Scenario, fault, losses


def test_a_worker_comes_up_step_by_step() -> None:
    scenario = Scenario()
    assert scenario.slot.state == "backoff"
    assert scenario.apply(Tick()) == [Spawn(1)]
    assert scenario.slot.state == "spawning"
    scenario.apply(ProcessStarted(1, 4711))
    scenario.receive(Hello("s", 1, 4711))
    assert scenario.slot.state == "loading"
    scenario.receive(Loading("warming", 5, 10))
    assert scenario.slot.state == "loading"
    scenario.receive(Loading("canary"))
    assert scenario.slot.state == "canary"
    scenario.receive(READY)
    assert scenario.slot.state == "ready"
    assert scenario.slot.current is not None
    assert (scenario.slot.current.pid, scenario.slot.current.ready) == (4711, READY)


def test_a_first_loss_is_made_good_at_once_and_further_ones_are_not() -> None:
    scenario = Scenario().steady()
    assert scenario.apply(ProcessExited(1, -signal.SIGSEGV)) == []
    assert scenario.slot.state == "gone"
    record, spawn = scenario.wait(LAST_MESSAGES_S)
    assert isinstance(record, RecordLoss)
    assert (record.verdict.kind, record.worker.state_before_gone, record.done) == (
        "crashed",
        "ready",
        "a new worker starts at once",
    )
    assert spawn == Spawn(2)
    delays = []
    for _ in range(12):
        scenario.ready().wait(5, beat=IDLE)
        scenario.exit(-signal.SIGSEGV)
        assert scenario.slot.state == "backoff"
        delays.append(scenario.slot.retry_at - scenario.now)
        assert scenario.wait(delays[-1] - 0.01) == []
        assert scenario.wait(0.02)[0] == Spawn(scenario.slot.incarnation)
    assert delays[:4] == pytest.approx([1, 2, 4, 8])  # with the least jitter, half the bound
    assert delays[-1] == pytest.approx(BUDGETS.retry_max_s / 2)


def test_a_worker_that_held_clears_the_record() -> None:
    scenario = Scenario().ready()
    for _ in range(3):
        scenario.exit(70)
        scenario.wait(30)
        scenario.ready()
    assert scenario.slot.losses_in_a_row == 3
    scenario.steady()
    assert Spawn(5) in scenario.exit(70)
    assert scenario.slot.losses_in_a_row == 1


def test_somebodys_kill_is_not_held_against_the_slot() -> None:
    scenario = Scenario().ready()
    for incarnation in range(2, 8):
        scenario.wait(2, beat=IDLE)
        actions = scenario.exit(-signal.SIGKILL)
        assert losses(actions) == [("killed", "worker", "SIGKILL from outside")]
        assert actions[-1] == Spawn(incarnation)
        scenario.ready()
    assert scenario.slot.losses_in_a_row == 0


def test_a_worker_killed_before_it_was_ready_is_not_respawned_in_a_hot_loop() -> None:
    scenario = Scenario().start()
    scenario.exit(-signal.SIGKILL)
    assert scenario.slot.state == "backoff"
    assert scenario.slot.retry_at >= scenario.now + 0.5 - LAST_MESSAGES_S


def test_two_spawns_are_never_closer_than_the_spacing() -> None:
    scenario = Scenario().ready()
    scenario.wait(0.2, beat=IDLE)
    scenario.exit(-signal.SIGKILL)
    assert scenario.slot.state == "backoff"
    assert scenario.slot.retry_at == pytest.approx(100 + BUDGETS.spacing_s)


def test_a_worker_is_judged_by_its_last_words_even_if_they_come_after_its_exit() -> None:
    scenario = Scenario().ready()
    scenario.wait(2, beat=IDLE)
    assert scenario.apply(ProcessExited(1, 70)) == []
    actions = scenario.receive(fault(text="[METAL] first"))
    assert losses(actions) == [("metal_hang", "worker", "[METAL] first")]
    assert actions[-1] == Spawn(2)


def test_what_an_earlier_incarnation_says_changes_nothing() -> None:
    scenario = Scenario().ready()
    scenario.wait(2, beat=IDLE)
    scenario.exit(-signal.SIGKILL)
    before = scenario.slot
    for number, message in enumerate((IDLE, READY, fault(), Bye(0), Loading("canary"))):
        assert scenario.apply(MessageReceived(1, message)) == []
        assert scenario.slot.late_messages == number + 1
    assert scenario.apply(ProcessExited(1, 3)) == []
    assert scenario.slot.state == before.state
    assert scenario.slot.current == before.current


def test_a_worker_whose_process_ended_serves_no_more_before_it_is_known_why() -> None:
    scenario = Scenario().ready()
    assert scenario.apply(ProcessEnded(1)) == []
    assert scenario.slot.state == "gone"
    assert scenario.lost == []
    assert losses(scenario.exit(-signal.SIGSEGV)) == [("crashed", "worker", "killed by SIGSEGV")]


def test_a_fault_ends_an_incarnation_before_its_exit() -> None:
    scenario = Scenario().ready()
    scenario.wait(2, beat=IDLE)
    assert scenario.receive(fault()) == []
    assert scenario.slot.state == "gone"
    scenario.receive(fault(text="the mask"))
    scenario.receive(Bye(70))
    (record, _) = scenario.apply(ProcessExited(1, -signal.SIGABRT))
    assert isinstance(record, RecordLoss)
    assert record.verdict.first.text == "boom"
    assert record.worker.state_before_gone == "ready"


@pytest.mark.parametrize("scope", ["request", "batch"])
def test_a_fault_that_the_worker_outlives_changes_nothing(scope: Scope) -> None:
    scenario = Scenario().ready()
    assert scenario.receive(fault(scope)) == []
    assert scenario.slot.state == "ready"


def test_a_fault_that_wears_the_worker_out_recycles_it() -> None:
    scenario = Scenario().ready()
    assert scenario.receive(fault("recycle")) == [SendMessage(1, Drain(BUDGETS.drain_s))]
    assert scenario.slot.state == "draining"
    scenario.receive(Bye(Exit.RECYCLED, "Resource limit exceeded"))
    assert losses(scenario.exit(Exit.RECYCLED)) == []
    assert scenario.lost == []


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([ProcessExited(1, Exit.CONFIGURATION, "usage ...\nno such file: x")], "no such file: x"),
        (
            [MessageReceived(1, Bye(3, "bad adapter")), ProcessExited(1, Exit.CONFIGURATION)],
            "bad adapter",
        ),
        ([MessageReceived(1, fault("model", "no kernel")), ProcessExited(1, 70)], "no kernel"),
        (
            [
                MessageReceived(1, fault("worker", "no kernel")),
                ProcessExited(1, Exit.CONFIGURATION),
            ],
            "no kernel",
        ),
    ],
)
def test_a_configuration_that_cannot_work_fails_the_slot(events: list[Event], reason: str) -> None:
    scenario = Scenario().start()
    for event in events:
        scenario.apply(event)
    scenario.wait(3600)
    assert scenario.slot.state == "failed"
    assert reason in scenario.slot.detail
    assert scenario.apply(RecycleRequested()) == [Spawn(2)]


def test_a_process_that_cannot_be_started_backs_off() -> None:
    scenario = Scenario()
    scenario.apply(Tick())
    actions = scenario.apply(SpawnFailed(1, "Resource temporarily unavailable"))
    assert losses(actions) == [("not_started", "machine", "Resource temporarily unavailable")]
    assert scenario.slot.state == "backoff"
    assert scenario.wait(2)[0] == Spawn(2)


def test_a_recycle_loses_nothing_and_is_no_loss() -> None:
    scenario = Scenario().steady()
    assert scenario.apply(RecycleRequested()) == [SendMessage(1, Drain(BUDGETS.drain_s))]
    assert scenario.slot.state == "draining"
    assert scenario.apply(RecycleRequested()) == []
    assert scenario.wait(10, beat=Beat("decode", 1, running=1)) == []
    scenario.receive(Bye(Exit.RECYCLED))
    assert scenario.apply(ProcessExited(1, Exit.RECYCLED)) == [Spawn(2)]
    assert scenario.slot.losses_in_a_row == 0
    assert scenario.apply(RecycleRequested()) == []  # it is fresh


def test_a_worker_that_ignores_its_drain_climbs_the_ladder() -> None:
    heavy = Ready("ipc:///w", ModelCard(digest="d", weight_bytes=100 * 10**9))
    scenario = Scenario().ready(heavy)
    teardown = 100 * BUDGETS.teardown_s_per_gb
    scenario.apply(RecycleRequested())
    assert scenario.wait(BUDGETS.drain_s + BUDGETS.leave_s + teardown - 0.1, beat=IDLE) == []
    assert scenario.wait(0.2, beat=IDLE) == [SendSignal(1, signal.SIGTERM)]
    assert scenario.wait(BUDGETS.terminate_s + teardown - 0.2, beat=IDLE) == []
    assert scenario.wait(0.3, beat=IDLE) == [SendSignal(1, signal.SIGUSR2)]
    assert scenario.wait(BUDGETS.stacks_s, beat=IDLE) == [SendSignal(1, signal.SIGKILL)]
    assert [kind for kind, _, _ in losses(scenario.exit(-signal.SIGKILL))] == ["wedged"]


def test_a_worker_that_says_bye_and_stays_is_killed() -> None:
    scenario = Scenario().ready()
    scenario.receive(Bye(70))
    assert scenario.slot.state == "gone"
    actions = scenario.wait(BUDGETS.leave_s + BUDGETS.stacks_s)
    assert actions == [SendSignal(1, signal.SIGUSR2), SendSignal(1, signal.SIGKILL)]
    assert [kind for kind, _, _ in losses(scenario.exit(-signal.SIGKILL))] == ["wedged"]


def test_a_worker_that_keeps_recycling_itself_before_it_serves_backs_off() -> None:
    scenario = Scenario().start()
    assert losses(scenario.exit(Exit.RECYCLED)) == []
    assert (scenario.slot.state, scenario.slot.losses_in_a_row) == ("backoff", 1)


def test_a_stop_drains_those_that_serve() -> None:
    scenario = Scenario().ready()
    assert scenario.apply(StopRequested()) == [SendMessage(1, Drain(BUDGETS.stop_s))]
    assert scenario.exit(Exit.BYE) == []
    assert (scenario.slot.state, scenario.slot.current) == ("gone", None)
    assert scenario.wait(3600) == []
    assert scenario.apply(RecycleRequested()) == []


def test_a_stop_shortens_a_drain() -> None:
    scenario = Scenario().ready()
    scenario.apply(RecycleRequested())
    assert scenario.apply(StopRequested()) == [SendMessage(1, Drain(BUDGETS.stop_s))]
    actions = scenario.wait(BUDGETS.stop_s + BUDGETS.leave_s, beat=IDLE)
    assert actions == [SendSignal(1, signal.SIGTERM)]


def test_a_stop_ends_those_that_load() -> None:
    scenario = Scenario().start()
    assert scenario.apply(StopRequested()) == [SendSignal(1, signal.SIGTERM)]
    scenario.receive(Hello("s", 1, 4711))
    scenario.receive(READY)
    assert scenario.slot.state == "gone"
    assert scenario.wait(BUDGETS.terminate_s) == [SendSignal(1, signal.SIGKILL)]
    assert scenario.exit(-signal.SIGKILL) == []
    assert scenario.slot.current is None


def test_a_stop_in_backoff_or_failure_is_over_at_once() -> None:
    scenario = Scenario().start()
    scenario.exit(Exit.CONFIGURATION)
    scenario.apply(StopRequested())
    assert (scenario.slot.state, scenario.slot.current) == ("gone", None)
    assert scenario.wait(3600) == []


def test_a_hurried_stop_kills() -> None:
    scenario = Scenario().ready()
    scenario.apply(StopRequested())
    assert scenario.apply(StopRequested(hurry=True)) == [SendSignal(1, signal.SIGKILL)]
    assert scenario.exit(-signal.SIGKILL) == []
    assert scenario.slot.current is None
