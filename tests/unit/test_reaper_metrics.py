"""A node's metrics page: its contents, and that it does not grow."""

from __future__ import annotations

import itertools
import random
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from mayfly_protocol.common.histogram import NOTHING, STEP_BOUNDS_S
from mayfly_protocol.counters import Memory
from mayfly_protocol.lifecycle import Beat, Exit, Hello
from mayfly_protocol.roster import AskMetrics, MetricsText
from mayfly_reaper.machine.memory import MachineMemory
from mayfly_reaper.metrics import NodeMetrics
from mayfly_reaper.rules.events import (
    Event,
    MessageReceived,
    ProcessExited,
    ProcessStarted,
    RecycleRequested,
    SpawnAllowed,
    SpawnDeferred,
    Tick,
)
from mayfly_reaper.rules.slot import SlotRules
from mayfly_reaper.rules.worker import LAST_MESSAGES_S
from mayfly_reaper.settings import Lifetime, Pool
from support.node import RunningNode, fake_worker
from support.server import free_port
from support.slot_scenario import BUDGETS, IDLE, READY, fault

POOL = Pool("org/model", Path("/nowhere"), lifetime=Lifetime(max_inferences=100))
Series = frozenset[tuple[str, str]]


class MeteredSlot:
    """A slot of a node whose metrics are recorded."""

    def __init__(self, room: MachineMemory = MachineMemory(5)) -> None:  # noqa: B008
        self.now = 100.0
        self.metrics = NodeMetrics("mac-1", lambda: room, lambda: self.now)
        self.rules = SlotRules(BUDGETS, lambda: 0.5, itertools.count(1).__next__)
        self.slot = self.rules.begin("model-0", self.now)
        self.metrics.add_slot(self.slot, POOL)

    def apply(self, event: Event) -> None:
        before = self.slot
        self.slot, actions = self.rules.step(before, event, self.now)
        self.metrics.count_step(before, event, self.slot, actions, self.now)

    def receive(self, message: object) -> None:
        self.apply(MessageReceived(self.slot.incarnation, message))  # type: ignore[arg-type]

    def serve(self) -> None:
        self.now = max(self.now, self.slot.retry_at)
        self.apply(SpawnAllowed())
        self.apply(ProcessStarted(self.slot.incarnation, 4711))
        self.receive(Hello("model-0", self.slot.incarnation, 4711))
        self.receive(READY)
        self.receive(IDLE)

    def exit(self, status: int) -> None:
        self.apply(ProcessExited(self.slot.incarnation, status))
        self.now += LAST_MESSAGES_S
        self.apply(Tick())

    def samples(self) -> Iterator[tuple[str, dict[str, str], float]]:
        for family in text_string_to_metric_families(self.metrics.exposition().decode()):
            for sample in family.samples:
                yield sample.name, sample.labels, sample.value

    def value(self, name: str, **labels: str) -> float:
        [found] = [
            value
            for sample, its, value in self.samples()
            if sample == name and labels.items() <= its.items()
        ]
        return found

    def series(self) -> Series:
        return frozenset((name, str(sorted(its.items()))) for name, its, _ in self.samples())


def test_a_serving_worker() -> None:
    watched = MeteredSlot()
    watched.serve()
    watched.receive(
        Beat(
            phase="decode",
            progress=3,
            running=2,
            waiting=1,
            inferences=4,
            generated_tokens=50,
            prompt_tokens=30,
            cached_tokens=10,
            memory=Memory(footprint=7, active=6, cache=5, peak=8, prefix_cache=4),
            rows=2,
            kv_bytes=11,
            kv_budget=22,
            prefill_lengths=3,
            decode_s=NOTHING.observed(0.02, STEP_BOUNDS_S),
        )
    )
    watched.now += 0.25
    expected = {
        "state": 1,
        "inferences_since_start": 4,
        "inferences_budget": 100,
        "heartbeat_age_seconds": 0.25,
        "progress_age_seconds": 0.25,
        "requests_running": 2,
        "requests_waiting": 1,
        "batch_rows": 2,
        "kv_bytes": 11,
        "kv_budget_bytes": 22,
        "prefill_lengths": 3,
        "generated_tokens_total": 50,
        "prefill_tokens_total": 20,
        "starts_total": 1,
        "decode_step_seconds_count": 1,
        "decode_step_seconds_sum": 0.02,
        "load_seconds_count": 1,
    }
    for name, value in expected.items():
        labels = {"state": "ready"} if name == "state" else {}
        assert watched.value(f"mayfly_worker_{name}", **labels) == pytest.approx(value), name
    for kind, value in {"footprint": 7, "active": 6, "cache": 5, "peak": 8}.items():
        assert watched.value("mayfly_worker_memory_bytes", kind=kind) == value
    assert watched.value("mayfly_worker_decode_step_seconds_bucket", le="0.01") == 0
    assert watched.value("mayfly_worker_decode_step_seconds_bucket", le="0.025") == 1
    assert watched.value("mayfly_node_memory_bytes", node="mac-1", kind="available") == 5
    for _, labels, _ in watched.samples():
        assert labels["node"] == "mac-1"


def test_wired_memory_is_shown_where_it_is_known() -> None:
    assert MeteredSlot(MachineMemory(5, 7)).value("mayfly_node_memory_bytes", kind="wired") == 7


def test_a_slot_without_a_worker() -> None:
    watched = MeteredSlot()
    watched.apply(SpawnDeferred(watched.now + 1, "no room", "memory_lost"))
    assert watched.value("mayfly_worker_state", state="backoff") == 1
    assert watched.value("mayfly_worker_state", state="ready") == 0
    assert watched.value("mayfly_worker_held", reason="memory_lost") == 1
    assert watched.value("mayfly_worker_memory_bytes", kind="footprint") == 0
    watched.now += 1
    watched.serve()
    assert watched.value("mayfly_worker_held", reason="memory_lost") == 0


def test_two_workers_of_a_slot_share_its_series() -> None:
    watched = MeteredSlot()
    watched.serve()
    watched.receive(replace(IDLE, memory=Memory(footprint=7)))
    watched.apply(RecycleRequested(surge=True))
    watched.apply(MessageReceived(2, Hello("model-0", 2, 4712)))
    watched.apply(MessageReceived(2, Beat(phase="loading", progress=0, memory=Memory(footprint=3))))
    assert watched.value("mayfly_worker_state", state="ready") == 1
    assert watched.value("mayfly_worker_state", state="loading") == 1
    assert watched.value("mayfly_worker_memory_bytes", kind="footprint") == 10


def test_a_thousand_restarts_add_no_time_series() -> None:
    """Workers end in every possible way, each with numbers and texts of its own."""
    watched = MeteredSlot()
    random.seed(7)

    def crash() -> None:
        watched.exit(-random.choice([signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT]))

    def meet_a_fault() -> None:
        watched.receive(fault("worker", text=f"{random.random()}", kind=f"kind-{random.random()}"))
        watched.exit(Exit.POISONED)

    def wear_out() -> None:
        watched.apply(
            RecycleRequested(cause=random.choice(["inferences", "age", "memory", "asked"]))
        )
        watched.exit(Exit.BYE)

    def survive() -> None:
        for _ in range(2):
            watched.receive(fault("batch", kind="shape"))
        watched.exit(Exit.RECYCLED)

    ends = (crash, meet_a_fault, wear_out, survive)

    def live_and_die(times: int) -> None:
        for end in itertools.islice(itertools.cycle(ends), times):
            watched.serve()
            watched.receive(replace(IDLE, inferences=random.randrange(9)))
            end()

    live_and_die(40)
    before = watched.series()
    live_and_die(1000)
    assert watched.slot.incarnation == 1040
    assert watched.series() == before
    assert watched.value("mayfly_worker_starts_total") == 1040


@pytest.mark.process
def test_a_node_serves_its_metrics(tmp_path: Path) -> None:
    port = free_port()
    with RunningNode(
        tmp_path, fake_worker("--behave", "crash", "--after", "0.3"), metrics=port
    ) as node:
        node.ready(incarnation=2)
        text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
        slot = 'model="org/fake model",node="test"'
        for line in (
            f'mayfly_worker_starts_total{{{slot},slot="fake-model-0"}} 2.0',
            f'mayfly_faults_total{{kind="crashed",{slot},scope="worker",slot="fake-model-0"}} 1.0',
        ):
            assert line in text
        answer = node.ask(AskMetrics())
        assert isinstance(answer, MetricsText)
        assert {line.split("{")[0] for line in answer.text.splitlines()} == {
            line.split("{")[0] for line in text.splitlines()
        }
        with RunningNode(tmp_path / "other", metrics=port) as second:
            refusal = second.refusal()
            assert f"cannot serve metrics on 127.0.0.1 port {port}: Address" in refusal
            assert "--metrics-port" in refusal
