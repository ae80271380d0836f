"""How a slot tells a worker that is silent or stands still from one that is slow."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from mayfly_protocol.common.histogram import Distribution
from mayfly_protocol.lifecycle import Beat, Hello, Loading
from mayfly_reaper.rules.events import RecycleAsked, Tick
from mayfly_reaper.rules.incarnation import Record, Signal, Spawn
from support.slot_scenario import BUDGETS, Story, fault, losses


@pytest.mark.parametrize("state", ["spawning", "loading", "ready", "draining"])
def test_a_silent_worker_is_killed_at_once(state: str) -> None:
    story = Story().start()
    budget = BUDGETS.hello_s
    if state == "loading":
        story.say(Hello("s", 1, 4711))
        budget = BUDGETS.load_silent_s
    elif state != "spawning":
        story.ready()
        budget = BUDGETS.silent_s
    if state == "draining":
        story.tell(RecycleAsked())
    assert story.slot.state == state
    assert story.wait(budget - 0.1) == []
    assert story.wait(0.2) == [Signal(1, signal.SIGKILL)]
    assert story.slot.state == "gone"
    actions = story.exit(-signal.SIGKILL)
    assert [kind for kind, _, _ in losses(actions)] == ["silent"]


def test_a_worker_that_beats_and_does_not_move_is_wedged() -> None:
    story = Story().ready()
    story.say(Beat("prefill", 1, running=1))
    story.say(Beat("decode", 2, running=1))
    story.say(Beat("decode", 3, running=1, waiting=1))
    stuck = Beat("decode", 3, running=1, waiting=1)
    assert story.wait(BUDGETS.decode_s - 0.1, beat=stuck) == []
    assert story.wait(0.2, beat=stuck) == [Signal(1, signal.SIGUSR2)]
    assert story.slot.state == "gone"
    assert story.wait(BUDGETS.stacks_s, beat=stuck) == [Signal(1, signal.SIGTERM)]
    story.say(fault(text="raised by the SIGTERM"))
    assert story.wait(BUDGETS.terminate_s, beat=stuck) == [Signal(1, signal.SIGKILL)]
    assert story.wait(60, beat=stuck) == []
    (record, spawn) = story.exit(-signal.SIGKILL)
    assert isinstance(record, Record)
    assert record.verdict.kind == "wedged"
    assert record.verdict.first.text == "no progress in decode (1 running, 1 waiting) for 20 s"
    assert [cause.text for cause in record.verdict.later] == ["raised by the SIGTERM"]
    assert spawn == Spawn(2)


def test_a_first_step_may_take_three_times_as_long() -> None:
    story = Story().ready()
    assert story.wait(3 * BUDGETS.prefill_s - 0.1, beat=Beat("prefill", 0, running=1)) == []
    story.say(Beat("prefill", 1, running=1))
    assert story.wait(BUDGETS.prefill_s - 0.1, beat=Beat("prefill", 1, running=1)) == []
    assert story.wait(0.2, beat=Beat("prefill", 1, running=1)) == [Signal(1, signal.SIGUSR2)]


def test_steps_between_two_beats_are_no_longer_the_first_ones() -> None:
    """A worker that answers short requests is hardly ever found prefilling."""
    done = Distribution((40,), 0.4)
    story = Story().ready()
    story.say(Beat("decode", 40, running=1, decode_s=Distribution((39,), 0.2)))
    story.say(Beat("idle", 80, prefill_s=done, decode_s=done))
    stuck = Beat("prefill", 80, running=1, prefill_s=done, decode_s=done)
    story.say(stuck)
    assert story.wait(BUDGETS.prefill_s - 0.1, beat=stuck) == []
    assert story.wait(0.2, beat=stuck) == [Signal(1, signal.SIGUSR2)]


def test_a_worker_is_not_killed_for_being_slow() -> None:
    story = Story().start()
    story.say(Hello("s", 1, 4711))
    for done in range(20):  # a cold load of more than half an hour
        story.say(Loading("loading", done, 20))
        assert story.wait(100, beat=Beat("loading", 0)) == []
    story.ready()
    for chunk in range(24):  # a prefill of more than ten minutes
        assert story.wait(29, beat=Beat("prefill", chunk, running=1)) == []
    assert story.wait(600, beat=Beat("idle", 24)) == []
    assert story.slot.state == "ready"


def test_requests_that_wait_beside_an_idle_engine_are_a_wedge() -> None:
    story = Story().ready()
    actions = story.wait(3 * BUDGETS.prefill_s + 1, beat=Beat("idle", 5, waiting=1))
    assert actions[0] == Signal(1, signal.SIGUSR2)


def test_requests_that_are_still_prepared_are_not_the_engines() -> None:
    """A client whose prompt takes a minute to tokenize costs no worker its life."""
    story = Story().ready()
    story.say(Beat("idle", 4))
    assert story.wait(600, beat=Beat("idle", 5, waiting=2, preparing=2)) == []
    assert story.slot.state == "ready"
    actions = story.wait(BUDGETS.prefill_s + 1, beat=Beat("idle", 5, waiting=2, preparing=1))
    assert actions[0] == Signal(1, signal.SIGUSR2)


def test_a_load_that_stands_still_is_wedged() -> None:
    story = Story().start()
    story.say(Hello("s", 1, 4711))
    story.say(Loading("warming", 5, 10))
    actions = story.wait(BUDGETS.load_still_s + 1, beat=Beat("loading", 0))
    assert actions[0] == Signal(1, signal.SIGUSR2)
    assert losses(story.exit(-signal.SIGKILL))[0][2] == "no progress while warming for 120 s"


def test_the_time_to_hello_is_none_of_a_load_that_stands_still() -> None:
    """Each has a budget of its own, and either may be the longer one."""
    story = Story(replace(BUDGETS, hello_s=60.0, load_still_s=10.0)).start()
    assert story.wait(59.5) == []
    story.say(Hello("s", 1, 4711))
    assert story.wait(9.5) == []
    assert story.wait(1.0)[0] == Signal(1, signal.SIGUSR2)


@pytest.mark.parametrize("gap", [4.0, 3600.0])
def test_a_machine_that_slept_finds_no_worker_late(gap: float) -> None:
    story = Story().ready()
    story.say(Beat("decode", 1, running=1))
    story.say(Beat("decode", 2, running=1))
    story.wait(4.5)
    story.now += gap
    assert story.tell(Tick()) == []
    assert story.wait(0.4) == []  # the half second that was left
    assert story.wait(0.2) == [Signal(1, signal.SIGKILL)]
