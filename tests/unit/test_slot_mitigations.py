"""A slot's reaction to repeated faults, and to a machine that cannot go on."""

from __future__ import annotations

import signal

import pytest

from mayfly_protocol.breadcrumb import Breadcrumb
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
from mayfly_reaper.rules.actions import RecordLoss, SendMessage, Spawn, WipeKernels
from mayfly_reaper.rules.events import ProcessExited, RecycleRequested, SpawnDeferred, Tick
from mayfly_reaper.rules.mitigations import NO_MITIGATIONS, Mitigations
from mayfly_reaper.rules.slot import REQUEST_LOSSES
from mayfly_reaper.rules.worker import LAST_MESSAGES_S
from support.slot_scenario import BUDGETS, IDLE, Scenario, fault, losses

DRAIN = Drain(BUDGETS.drain_s)


def lose(scenario: Scenario, kind: str) -> list[object]:
    """A worker that serves meets a fault and goes."""
    scenario.receive(fault(KINDS[kind].scope, kind=kind))
    return list(scenario.apply(ProcessExited(scenario.slot.incarnation, 70)))


def again(scenario: Scenario) -> Scenario:
    scenario.wait(max(0.5, scenario.slot.retry_at - scenario.now))
    return scenario.ready()


# -- faults that a worker outlives ------------------------------------------------------------


def test_a_second_batch_fault_within_a_minute_recycles_the_worker() -> None:
    scenario = Scenario().ready()
    assert scenario.receive(fault("batch", kind="allocation_failed")) == []
    scenario.wait(59, beat=IDLE)
    assert scenario.receive(fault("batch", kind="shape")) == [SendMessage(1, DRAIN)]
    assert scenario.slot.state == "draining"


def test_batch_faults_that_are_rare_and_those_of_requests_do_not() -> None:
    scenario = Scenario().ready()
    for _ in range(4):
        assert scenario.receive(fault("batch")) == []
        assert scenario.receive(fault("request")) == []
        assert scenario.receive(fault("request")) == []
        scenario.wait(60.5, beat=IDLE)
    assert scenario.slot.state == "ready"


def test_what_a_worker_outlived_stands_in_its_autopsy() -> None:
    scenario = Scenario().ready()
    scenario.receive(fault("batch", "odd shapes", kind="shape"))
    scenario.wait(2, beat=IDLE)
    (record, _) = scenario.exit(-signal.SIGSEGV)
    assert isinstance(record, RecordLoss)
    assert record.verdict.kind == "crashed"
    assert [each.fault.first.text for each in record.worker.survived] == ["odd shapes"]


# -- trials ----------------------------------------------------------------------------------


def on_trial() -> Scenario:
    scenario = Scenario().ready()
    scenario.wait(2, beat=IDLE)
    for _ in range(BUDGETS.trial_losses):
        assert scenario.slot.current is not None
        assert not scenario.slot.current.trial
        lose(scenario, "cuda_sticky")
        again(scenario)
    assert scenario.slot.current is not None
    assert scenario.slot.current.trial
    return scenario


def test_after_losses_in_a_row_the_next_worker_is_on_trial_until_it_has_held() -> None:
    scenario = on_trial()
    scenario.wait(BUDGETS.trial_s - 0.5, beat=IDLE)
    assert scenario.slot.current is not None
    assert scenario.slot.current.trial
    assert scenario.rules.due(scenario.slot) <= scenario.now + 0.5
    scenario.wait(0.5, beat=IDLE)
    assert not scenario.slot.current.trial


def test_a_trial_ends_early_with_work_that_was_done() -> None:
    scenario = on_trial()
    scenario.receive(Beat("idle", 1, inferences=BUDGETS.trial_inferences - 1))
    assert scenario.slot.current is not None
    assert scenario.slot.current.trial
    scenario.receive(Beat("idle", 2, inferences=BUDGETS.trial_inferences))
    assert not scenario.slot.current.trial


# -- pauses ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["metal_timeout", "metal_out_of_memory"])
def test_a_busy_gpu_gets_a_pause_even_after_a_first_loss(kind: str) -> None:
    scenario = Scenario().steady()
    lose(scenario, kind)
    assert scenario.slot.state == "backoff"
    assert scenario.slot.retry_at == pytest.approx(scenario.now + BUDGETS.retry_s / 2)


def test_B01_the_pause_does_not_grow_while_requests_may_be_what_workers_die_of() -> None:
    """Eight requests end three workers each; those beside them wait for the next one meanwhile."""
    scenario = Scenario().ready()
    pauses = []
    for number in range(REQUEST_LOSSES + 4):
        crumb = Breadcrumb("prefill", 7, (f"r{number}",))
        lost = ProcessExited(scenario.slot.incarnation, -signal.SIGSEGV, crumb=crumb)
        scenario.apply(lost)
        scenario.wait(LAST_MESSAGES_S)
        pauses.append(scenario.slot.retry_at - scenario.now)
        again(scenario)
    assert max(pauses[:REQUEST_LOSSES]) <= BUDGETS.retry_s * 2
    assert pauses[-1] > BUDGETS.retry_s * 2, "a machine that fails at every request is left alone"


def test_B01_the_pause_grows_where_workers_die_of_no_request() -> None:
    scenario = Scenario().ready()
    for _ in range(5):
        scenario.apply(ProcessExited(scenario.slot.incarnation, -signal.SIGSEGV))
        scenario.wait(LAST_MESSAGES_S)
        pause = scenario.slot.retry_at - scenario.now
        again(scenario)
    assert pause > BUDGETS.retry_s * 4


def test_a_kill_by_the_system_gets_a_pause_and_less_memory() -> None:
    scenario = Scenario().ready(Ready("ipc:///w", ModelCard(digest="d", weight_bytes=10**9)))
    scenario.wait(2, beat=Beat("idle", 1, memory=Memory(footprint=10 * 10**9)))
    scenario.apply(ProcessExited(1, -signal.SIGKILL, oom_evidence="the count went up"))
    actions = scenario.wait(0.05)
    assert losses(actions)[0][:2] == ("killed_by_system", "machine")
    assert scenario.slot.state == "backoff"
    (spawn,) = scenario.wait(0.5)
    assert spawn == Spawn(2, Mitigations(memory_limit=8 * 10**9))


@pytest.mark.parametrize("phase", ["starting", "warming", "loading", "canary"])
def test_a_kill_by_the_system_while_loading_takes_no_memory_from_the_next(phase: LoadPhase) -> None:
    """The worker's memory by then is less than its weights, and would leave no room for any
    context."""
    scenario = Scenario().start()
    scenario.receive(Hello("s", 1, 4711))
    scenario.receive(Loading(phase, 3 * 10**9, 16 * 10**9))
    scenario.wait(2, beat=Beat("loading", 1, memory=Memory(footprint=3 * 10**9)))
    scenario.apply(ProcessExited(1, -signal.SIGKILL, oom_evidence="the count went up"))
    assert losses(scenario.wait(0.05))[0][0] == "killed_by_system"
    (spawn,) = scenario.wait(max(0.5, scenario.slot.retry_at - scenario.now))
    assert spawn == Spawn(2)


def test_nothing_is_spawned_while_the_machine_is_held_and_the_slot_says_why() -> None:
    scenario = Scenario().steady()
    scenario.slot, _ = scenario.rules.step(scenario.slot, ProcessExited(1, 70), scenario.now)
    scenario.now += 0.05
    scenario.slot, _ = scenario.rules.step(scenario.slot, Tick(), scenario.now)
    for _ in range(5):
        assert scenario.rules.wants_worker(scenario.slot, scenario.now)
        held = SpawnDeferred(scenario.now + 0.5, "waits for the last worker's memory")
        scenario.slot, actions = scenario.rules.step(scenario.slot, held, scenario.now)
        assert actions == []
        assert scenario.slot.detail == held.reason
        assert scenario.rules.due(scenario.slot) == held.until
        assert not scenario.rules.wants_worker(scenario.slot, scenario.now)
        scenario.now += 0.5
    assert scenario.apply(Tick()) == [Spawn(2)]


def test_an_operator_overrules_a_hold() -> None:
    scenario = Scenario()
    scenario.slot, _ = scenario.rules.step(
        scenario.slot, SpawnDeferred(1e9, "no room"), scenario.now
    )
    assert scenario.apply(RecycleRequested()) == [Spawn(1)]


# -- mitigations -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kinds", "mitigations"),
    [
        (["cuda_graph_launch"], NO_MITIGATIONS),
        (["cuda_graph_launch", "cuda_capture"], Mitigations(without_graphs=True)),
        (["cuda_graph_launch", "crashed", "cuda_graph_launch"], NO_MITIGATIONS),
        (["metal_timeout", "metal_timeout"], Mitigations(short_buffers=True)),
        (["metal_timeout", "metal_hang", "metal_timeout"], NO_MITIGATIONS),
        (["metal_interactivity"], Mitigations(halved_chunks=1)),
        (["metal_interactivity"] * 9, Mitigations(halved_chunks=3)),
        (["metal_out_of_memory", "metal_out_of_memory"], Mitigations(halved_rows=2)),
        (["cuda_capture", "cuda_capture", "crashed"], Mitigations(without_graphs=True)),
    ],
)
def test_the_next_worker_is_spared_what_the_last_ones_died_of(
    kinds: list[str], mitigations: Mitigations
) -> None:
    scenario = Scenario().ready()
    scenario.wait(2, beat=IDLE)
    for kind in kinds:
        actions = lose(scenario, kind)
        if scenario.slot.current is None:
            actions = scenario.wait(scenario.slot.retry_at - scenario.now)
        spawn = actions[-1]
        scenario.ready()
    assert spawn == Spawn(len(kinds) + 1, mitigations)


def test_an_autopsy_says_what_the_next_worker_is_spared() -> None:
    scenario = Scenario().ready()
    lose(scenario, "cuda_capture")
    again(scenario)
    record = lose(scenario, "cuda_capture")[0]
    assert isinstance(record, RecordLoss)
    assert record.done.endswith("with MLX_USE_CUDA_GRAPHS=0")


def test_precautions_become_variables_and_options() -> None:
    assert NO_MITIGATIONS.environment() == {}
    assert Mitigations(without_graphs=True).environment() == {"MLX_USE_CUDA_GRAPHS": "0"}
    assert Mitigations(short_buffers=True).environment() == {
        "MLX_MAX_OPS_PER_BUFFER": "10",
        "MLX_MAX_MB_PER_BUFFER": "10",
    }
    configured: dict[str, object] = {"max_rows": 3, "trust_remote_code": True}
    assert NO_MITIGATIONS.options(configured) == configured
    mild = Mitigations(halved_chunks=1, halved_rows=2, memory_limit=5)
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
    limited = NO_MITIGATIONS.after("killed_by_system", "", footprint=100, weight_bytes=50)
    assert limited.memory_limit == 80
    again = limited.after("killed_by_system", "killed_by_system", footprint=99, weight_bytes=50)
    assert again.memory_limit == 64
    least = again.after("killed_by_system", "killed_by_system", footprint=60, weight_bytes=50)
    assert least.memory_limit == 55
    assert NO_MITIGATIONS.after("killed_by_system", "") == NO_MITIGATIONS


def test_broken_kernels_are_removed_once_and_then_fail_the_slot() -> None:
    scenario = Scenario().start()
    scenario.receive(fault("model", "Failed to compile kernel: x", kind="cuda_compile"))
    record, wipe = scenario.apply(ProcessExited(1, 70))
    assert isinstance(record, RecordLoss)
    assert record.done.startswith("its compiled kernels are removed; a new worker starts in")
    assert wipe == WipeKernels()
    scenario.wait(1)
    scenario.receive(fault("model", "Failed to compile kernel: x", kind="cuda_compile"))
    (record,) = scenario.apply(ProcessExited(2, 70))
    assert scenario.slot.state == "failed"


def test_kernels_that_broke_long_ago_do_not_count() -> None:
    scenario = Scenario().start()
    scenario.receive(fault("model", kind="cuda_compile"))
    scenario.apply(ProcessExited(1, 70))
    again(scenario)
    scenario.steady()
    assert WipeKernels() not in lose(scenario, "crashed")
    again(scenario)
    assert WipeKernels() in lose(scenario, "cuda_compile")
