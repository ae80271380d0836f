"""What a slot makes of faults that come again, and of a machine that is in no state to go on."""

from __future__ import annotations

import signal

import pytest

from mayfly_protocol.counters import Memory
from mayfly_protocol.faults import KINDS
from mayfly_protocol.lifecycle import (
    Beat,
    Drain,
    Hello,
    Loading,
    LoadPhase,
    ModelCard,
    Ready,
)
from mayfly_reaper.rules.events import Exited, Held, RecycleAsked, Tick
from mayfly_reaper.rules.incarnation import Record, Send, Spawn, WipeKernels
from mayfly_reaper.rules.mitigations import NONE, Precautions
from support.slot_scenario import BUDGETS, IDLE, Story, fault, losses

DRAIN = Drain(BUDGETS.drain_s)


def lose(story: Story, kind: str) -> list[object]:
    """A worker that serves meets a fault and goes."""
    story.say(fault(KINDS[kind].scope, kind=kind))
    return list(story.tell(Exited(story.slot.incarnation, 70)))


def again(story: Story) -> Story:
    story.wait(max(0.5, story.slot.retry_at - story.now))
    return story.ready()


# -- faults that a worker outlives ------------------------------------------------------------


def test_a_second_batch_fault_within_a_minute_recycles_the_worker() -> None:
    story = Story().ready()
    assert story.say(fault("batch", kind="allocation_failed")) == []
    story.wait(59, beat=IDLE)
    assert story.say(fault("batch", kind="shape")) == [Send(1, DRAIN)]
    assert story.slot.state == "draining"


def test_batch_faults_that_are_rare_and_those_of_requests_do_not() -> None:
    story = Story().ready()
    for _ in range(4):
        assert story.say(fault("batch")) == []
        assert story.say(fault("request")) == []
        assert story.say(fault("request")) == []
        story.wait(60.5, beat=IDLE)
    assert story.slot.state == "ready"


def test_what_a_worker_outlived_stands_in_its_autopsy() -> None:
    story = Story().ready()
    story.say(fault("batch", "odd shapes", kind="shape"))
    story.wait(2, beat=IDLE)
    (record, _) = story.exit(-signal.SIGSEGV)
    assert isinstance(record, Record)
    assert record.verdict.kind == "crashed"
    assert [each.fault.first.text for each in record.life.survived] == ["odd shapes"]


# -- trials ----------------------------------------------------------------------------------


def on_trial() -> Story:
    story = Story().ready()
    story.wait(2, beat=IDLE)
    for _ in range(BUDGETS.trial_losses):
        assert story.slot.life is not None
        assert not story.slot.life.trial
        lose(story, "cuda_sticky")
        again(story)
    assert story.slot.life is not None
    assert story.slot.life.trial
    return story


def test_after_losses_in_a_row_the_next_worker_is_on_trial_until_it_has_held() -> None:
    story = on_trial()
    story.wait(BUDGETS.trial_s - 0.5, beat=IDLE)
    assert story.slot.life is not None
    assert story.slot.life.trial
    assert story.rules.due(story.slot) <= story.now + 0.5
    story.wait(0.5, beat=IDLE)
    assert not story.slot.life.trial


def test_a_trial_ends_early_with_work_that_was_done() -> None:
    story = on_trial()
    story.say(Beat("idle", 1, inferences=BUDGETS.trial_inferences - 1))
    assert story.slot.life is not None
    assert story.slot.life.trial
    story.say(Beat("idle", 2, inferences=BUDGETS.trial_inferences))
    assert not story.slot.life.trial


# -- pauses ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["metal_timeout", "metal_out_of_memory"])
def test_a_busy_gpu_gets_a_pause_even_after_a_first_loss(kind: str) -> None:
    story = Story().steady()
    lose(story, kind)
    assert story.slot.state == "backoff"
    assert story.slot.retry_at == pytest.approx(story.now + BUDGETS.retry_s / 2)


def test_a_kill_by_the_system_gets_a_pause_and_less_memory() -> None:
    story = Story().ready(Ready("ipc:///w", ModelCard(digest="d", weight_bytes=10**9)))
    story.wait(2, beat=Beat("idle", 1, memory=Memory(footprint=10 * 10**9)))
    story.tell(Exited(1, -signal.SIGKILL, starved="the count went up"))
    actions = story.wait(0.05)
    assert losses(actions)[0][:2] == ("killed_by_system", "machine")
    assert story.slot.state == "backoff"
    (spawn,) = story.wait(0.5)
    assert spawn == Spawn(2, Precautions(memory_limit=8 * 10**9))


@pytest.mark.parametrize("phase", ["starting", "warming", "loading", "canary"])
def test_a_kill_by_the_system_while_loading_takes_no_memory_from_the_next(phase: LoadPhase) -> None:
    """What it had by then is less than its weights, and would leave no room for any context."""
    story = Story().start()
    story.say(Hello("s", 1, 4711))
    story.say(Loading(phase, 3 * 10**9, 16 * 10**9))
    story.wait(2, beat=Beat("loading", 1, memory=Memory(footprint=3 * 10**9)))
    story.tell(Exited(1, -signal.SIGKILL, starved="the count went up"))
    assert losses(story.wait(0.05))[0][0] == "killed_by_system"
    (spawn,) = story.wait(max(0.5, story.slot.retry_at - story.now))
    assert spawn == Spawn(2)


def test_nothing_is_spawned_while_the_machine_is_held_and_the_slot_says_why() -> None:
    story = Story().steady()
    story.slot, _ = story.rules.step(story.slot, Exited(1, 70), story.now)
    story.now += 0.05
    story.slot, _ = story.rules.step(story.slot, Tick(), story.now)
    for _ in range(5):
        assert story.rules.wants_worker(story.slot, story.now)
        held = Held(story.now + 0.5, "waits for the last worker's memory")
        story.slot, actions = story.rules.step(story.slot, held, story.now)
        assert actions == []
        assert story.slot.detail == held.reason
        assert story.rules.due(story.slot) == held.until
        assert not story.rules.wants_worker(story.slot, story.now)
        story.now += 0.5
    assert story.tell(Tick()) == [Spawn(2)]


def test_an_operator_overrules_a_hold() -> None:
    story = Story()
    story.slot, _ = story.rules.step(story.slot, Held(1e9, "no room"), story.now)
    assert story.tell(RecycleAsked()) == [Spawn(1)]


# -- precautions -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kinds", "precautions"),
    [
        (["cuda_graph_launch"], NONE),
        (["cuda_graph_launch", "cuda_capture"], Precautions(without_graphs=True)),
        (["cuda_graph_launch", "crashed", "cuda_graph_launch"], NONE),
        (["metal_timeout", "metal_timeout"], Precautions(short_buffers=True)),
        (["metal_timeout", "metal_hang", "metal_timeout"], NONE),
        (["metal_interactivity"], Precautions(halved_chunks=1)),
        (["metal_interactivity"] * 9, Precautions(halved_chunks=3)),
        (["metal_out_of_memory", "metal_out_of_memory"], Precautions(halved_rows=2)),
        (["cuda_capture", "cuda_capture", "crashed"], Precautions(without_graphs=True)),
    ],
)
def test_the_next_worker_is_spared_what_the_last_ones_died_of(
    kinds: list[str], precautions: Precautions
) -> None:
    story = Story().ready()
    story.wait(2, beat=IDLE)
    for kind in kinds:
        actions = lose(story, kind)
        if story.slot.life is None:
            actions = story.wait(story.slot.retry_at - story.now)
        spawn = actions[-1]
        story.ready()
    assert spawn == Spawn(len(kinds) + 1, precautions)


def test_an_autopsy_says_what_the_next_worker_is_spared() -> None:
    story = Story().ready()
    lose(story, "cuda_capture")
    again(story)
    record = lose(story, "cuda_capture")[0]
    assert isinstance(record, Record)
    assert record.done.endswith("with MLX_USE_CUDA_GRAPHS=0")


def test_precautions_become_variables_and_options() -> None:
    assert NONE.environment() == {}
    assert Precautions(without_graphs=True).environment() == {"MLX_USE_CUDA_GRAPHS": "0"}
    assert Precautions(short_buffers=True).environment() == {
        "MLX_MAX_OPS_PER_BUFFER": "10",
        "MLX_MAX_MB_PER_BUFFER": "10",
    }
    configured: dict[str, object] = {"max_rows": 3, "trust_remote_code": True}
    assert NONE.options(configured) == configured
    mild = Precautions(halved_chunks=1, halved_rows=2, memory_limit=5)
    assert mild.options(configured) == {
        "max_rows": 1,
        "trust_remote_code": True,
        "prefill_alone_s": 0.5,
        "prefill_shared_s": 0.125,
        "memory_limit": 5,
    }
    assert mild.options({"memory_limit": 4})["memory_limit"] == 4
    assert mild.options({"memory_limit": 0})["memory_limit"] == 5
    assert str(mild) == "prefill chunks of 1/2 of the time, 1/4 of the rows, at most 0.0 GB"


def test_a_memory_limit_leaves_room_for_the_weights() -> None:
    limited = NONE.after("killed_by_system", "", footprint=100, weight_bytes=50)
    assert limited.memory_limit == 80
    again = limited.after("killed_by_system", "killed_by_system", footprint=99, weight_bytes=50)
    assert again.memory_limit == 64
    least = again.after("killed_by_system", "killed_by_system", footprint=60, weight_bytes=50)
    assert least.memory_limit == 55
    assert NONE.after("killed_by_system", "") == NONE


def test_broken_kernels_are_removed_once_and_then_fail_the_slot() -> None:
    story = Story().start()
    story.say(fault("model", "Failed to compile kernel: x", kind="cuda_compile"))
    record, wipe = story.tell(Exited(1, 70))
    assert isinstance(record, Record)
    assert record.done.startswith("its compiled kernels are removed; back-off of")
    assert wipe == WipeKernels()
    story.wait(1)
    story.say(fault("model", "Failed to compile kernel: x", kind="cuda_compile"))
    (record,) = story.tell(Exited(2, 70))
    assert story.slot.state == "failed"


def test_kernels_that_broke_long_ago_do_not_count() -> None:
    story = Story().start()
    story.say(fault("model", kind="cuda_compile"))
    story.tell(Exited(1, 70))
    again(story)
    story.steady()
    assert WipeKernels() not in lose(story, "crashed")
    again(story)
    assert WipeKernels() in lose(story, "cuda_compile")
