"""Hang detection: silent and wedged workers, and slow ones, which are left alone."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from mayfly_protocol.common.histogram import Distribution
from mayfly_protocol.lifecycle import Beat, Hello, Loading
from mayfly_reaper.rules.actions import RecordLoss, SendSignal, Spawn
from mayfly_reaper.rules.events import RecycleRequested, Tick
from support.slot_scenario import BUDGETS, Scenario, fault, losses


@pytest.mark.parametrize("state", ["spawning", "loading", "ready", "draining"])
def test_a_silent_worker_is_killed_at_once(state: str) -> None:
    scenario = Scenario().start()
    budget = BUDGETS.hello_s
    if state == "loading":
        scenario.receive(Hello("s", 1, 4711))
        budget = BUDGETS.load_silent_s
    elif state != "spawning":
        scenario.ready()
        budget = BUDGETS.silent_s
    if state == "draining":
        scenario.apply(RecycleRequested())
    assert scenario.slot.state == state
    assert scenario.wait(budget - 0.1) == []
    assert scenario.wait(0.2) == [SendSignal(1, signal.SIGKILL)]
    assert scenario.slot.state == "gone"
    actions = scenario.exit(-signal.SIGKILL)
    assert [kind for kind, _, _ in losses(actions)] == ["silent"]


def test_a_worker_that_beats_and_does_not_move_is_wedged() -> None:
    scenario = Scenario().ready()
    scenario.receive(Beat("prefill", 1, running=1))
    scenario.receive(Beat("decode", 2, running=1))
    scenario.receive(Beat("decode", 3, running=1, waiting=1))
    stuck = Beat("decode", 3, running=1, waiting=1)
    assert scenario.wait(BUDGETS.decode_s - 0.1, beat=stuck) == []
    assert scenario.wait(0.2, beat=stuck) == [SendSignal(1, signal.SIGUSR2)]
    assert scenario.slot.state == "gone"
    assert scenario.wait(BUDGETS.stacks_s, beat=stuck) == [SendSignal(1, signal.SIGTERM)]
    scenario.receive(fault(text="raised by the SIGTERM"))
    assert scenario.wait(BUDGETS.terminate_s, beat=stuck) == [SendSignal(1, signal.SIGKILL)]
    assert scenario.wait(60, beat=stuck) == []
    (record, spawn) = scenario.exit(-signal.SIGKILL)
    assert isinstance(record, RecordLoss)
    assert record.verdict.kind == "wedged"
    assert record.verdict.first.text == "no progress in decode (1 running, 1 waiting) for 20 s"
    assert [cause.text for cause in record.verdict.later] == ["raised by the SIGTERM"]
    assert spawn == Spawn(2)


def test_a_first_step_may_take_three_times_as_long() -> None:
    scenario = Scenario().ready()
    assert scenario.wait(3 * BUDGETS.prefill_s - 0.1, beat=Beat("prefill", 0, running=1)) == []
    scenario.receive(Beat("prefill", 1, running=1))
    assert scenario.wait(BUDGETS.prefill_s - 0.1, beat=Beat("prefill", 1, running=1)) == []
    assert scenario.wait(0.2, beat=Beat("prefill", 1, running=1)) == [SendSignal(1, signal.SIGUSR2)]


def test_steps_between_two_beats_are_no_longer_the_first_ones() -> None:
    """A worker that answers short requests is hardly ever found prefilling."""
    done = Distribution((40,), 0.4)
    scenario = Scenario().ready()
    scenario.receive(Beat("decode", 40, running=1, decode_s=Distribution((39,), 0.2)))
    scenario.receive(Beat("idle", 80, prefill_s=done, decode_s=done))
    stuck = Beat("prefill", 80, running=1, prefill_s=done, decode_s=done)
    scenario.receive(stuck)
    assert scenario.wait(BUDGETS.prefill_s - 0.1, beat=stuck) == []
    assert scenario.wait(0.2, beat=stuck) == [SendSignal(1, signal.SIGUSR2)]


def test_a_worker_is_not_killed_for_being_slow() -> None:
    scenario = Scenario().start()
    scenario.receive(Hello("s", 1, 4711))
    for done in range(20):  # a cold load of more than half an hour
        scenario.receive(Loading("loading", done, 20))
        assert scenario.wait(100, beat=Beat("loading", 0)) == []
    scenario.ready()
    for chunk in range(24):  # a prefill of more than ten minutes
        assert scenario.wait(29, beat=Beat("prefill", chunk, running=1)) == []
    assert scenario.wait(600, beat=Beat("idle", 24)) == []
    assert scenario.slot.state == "ready"


def test_requests_that_wait_beside_an_idle_engine_are_a_wedge() -> None:
    scenario = Scenario().ready()
    actions = scenario.wait(3 * BUDGETS.prefill_s + 1, beat=Beat("idle", 5, waiting=1))
    assert actions[0] == SendSignal(1, signal.SIGUSR2)


def test_requests_that_are_still_prepared_are_not_the_engines() -> None:
    """A client whose prompt takes a minute to tokenize costs no worker its worker."""
    scenario = Scenario().ready()
    scenario.receive(Beat("idle", 4))
    assert scenario.wait(600, beat=Beat("idle", 5, waiting=2, preparing=2)) == []
    assert scenario.slot.state == "ready"
    actions = scenario.wait(BUDGETS.prefill_s + 1, beat=Beat("idle", 5, waiting=2, preparing=1))
    assert actions[0] == SendSignal(1, signal.SIGUSR2)


def test_a_load_that_stands_still_is_wedged() -> None:
    scenario = Scenario().start()
    scenario.receive(Hello("s", 1, 4711))
    scenario.receive(Loading("warming", 5, 10))
    actions = scenario.wait(BUDGETS.load_still_s + 1, beat=Beat("loading", 0))
    assert actions[0] == SendSignal(1, signal.SIGUSR2)
    assert losses(scenario.exit(-signal.SIGKILL))[0][2] == "no progress while warming for 120 s"


def test_the_time_to_hello_is_none_of_a_load_that_stands_still() -> None:
    """Each has a budget of its own, and either may be the longer one."""
    scenario = Scenario(replace(BUDGETS, hello_s=60.0, load_still_s=10.0)).start()
    assert scenario.wait(59.5) == []
    scenario.receive(Hello("s", 1, 4711))
    assert scenario.wait(9.5) == []
    assert scenario.wait(1.0)[0] == SendSignal(1, signal.SIGUSR2)


@pytest.mark.parametrize("gap", [4.0, 3600.0])
def test_a_machine_that_slept_finds_no_worker_late(gap: float) -> None:
    scenario = Scenario().ready()
    scenario.receive(Beat("decode", 1, running=1))
    scenario.receive(Beat("decode", 2, running=1))
    scenario.wait(4.5)
    scenario.now += gap
    assert scenario.apply(Tick()) == []
    assert scenario.wait(0.4) == []  # the half second that was left
    assert scenario.wait(0.2) == [SendSignal(1, signal.SIGKILL)]
