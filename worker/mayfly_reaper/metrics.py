"""Prometheus metrics of a node: its slots, their workers and the machine's memory.

``docs/metrics.md`` lists all metrics; those of a worker's counters are derived from the fields of
:class:`mayfly_protocol.counters.WorkerCounters`. The reaper passes every step of every slot's rules
to :class:`NodeMetrics`. A page of metrics shows the latest state and can be made on any thread:
slots and counters are replaced, never changed.

Each label has few values. No process has a time series of its own: the time series of a slot go on
from one worker to the next.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import get_args

from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from mayfly_protocol import counters
from mayfly_protocol.common.histogram import STEP_BOUNDS_S, Distribution
from mayfly_protocol.lifecycle import Beat
from mayfly_protocol.roster import SlotState
from mayfly_reaper.machine.memory import MachineMemory
from mayfly_reaper.paths import StartError
from mayfly_reaper.rules.actions import Action
from mayfly_reaper.rules.events import DeferCause, Event
from mayfly_reaper.rules.incarnation import Incarnation
from mayfly_reaper.rules.recycle import inference_budget
from mayfly_reaper.rules.slot import Slot
from mayfly_reaper.settings import Pool
from mayfly_reaper.slot_counters import (
    LOAD_BOUNDS_S,
    RECOVERY_BOUNDS_S,
    RESTART_REASONS,
    SlotCounters,
    count_step,
)

SLOT_LABELS = ("node", "slot", "model")
STATES: tuple[str, ...] = get_args(SlotState)
HOLD_CAUSES: tuple[str, ...] = get_args(DeferCause)
_NO_BEAT = Beat(phase="idle", progress=0)
_ALWAYS_SHOWN = {("wedged", "worker"): 0, ("silent", "worker"): 0}
"""Kinds and scopes of faults that are shown as 0 before they occur, so that alerts see the first
occurrence as an increase."""


Measured = Callable[[SlotCounters], Distribution]


@dataclass(frozen=True, slots=True)
class SlotRecord:
    """A slot (a place for one worker process at a time) with its counters and its model's
    settings."""

    pool: Pool
    slot: Slot
    counted: SlotCounters = field(default_factory=SlotCounters)


class NodeMetrics(Collector):
    """The Prometheus metrics of one node: of its slots, their workers and its machine.

    Args:
        measure: returns the machine's memory now.
        clock: the reaper's monotonic clock, in seconds.
    """

    def __init__(
        self,
        node: str,
        measure: Callable[[], MachineMemory],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node = node
        self._measure = measure
        self._clock = clock
        self._records: dict[str, SlotRecord] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def add_slot(self, slot: Slot, pool: Pool) -> None:
        """Adds a slot (a place for one worker process at a time) to the metrics. All slots have to
        be added before the metrics are first asked for."""
        self._records[slot.name] = SlotRecord(pool, slot)

    def count_step(
        self, before: Slot, event: Event, after: Slot, actions: Iterable[Action], now: float
    ) -> None:
        """Counts a step of a slot's rules, in which ``event`` turned the slot ``before`` into
        ``after`` and asked for ``actions``."""
        record = self._records[after.name]
        counted = count_step(record.counted, before, event, after, actions, now)
        self._records[after.name] = replace(record, slot=after, counted=counted)

    def exposition(self) -> bytes:
        """Returns all metrics in Prometheus's text format."""
        return generate_latest(self._registry)

    @property
    def registry(self) -> CollectorRegistry:
        return self._registry

    def collect(self) -> Iterator[Metric]:
        records = list(self._records.values())
        yield from _counters(self._node, records)
        yield from _histograms(self._node, records)
        yield from _states(self._node, records)
        yield from _gauges(self._node, records, self._clock())
        yield _machine(self._node, self._measure())


def _labels(node: str, record: SlotRecord) -> list[str]:
    return [node, record.slot.name, record.pool.model_name]


def _counters(node: str, records: list[SlotRecord]) -> Iterator[Metric]:
    def total(name: str) -> Callable[[SlotRecord], int]:
        return lambda s: int(getattr(s.counted.total, name))

    numbers: tuple[tuple[str, str, Callable[[SlotRecord], int]], ...] = (
        ("starts", "Worker processes started in the slot.", lambda s: s.counted.starts),
        *(
            (metric.name, metric.help, total(name))
            for name, metric in counters.metrics("counter").items()
        ),
        (
            "prefill_tokens",
            "Prompt tokens not found in the prefix cache, counted when the prefill begins.",
            lambda s: s.counted.total.prompt_tokens - s.counted.total.cached_tokens,
        ),
        (
            "messages",
            "Messages from workers to their supervisor (the reaper), such as heartbeats.",
            lambda s: s.counted.messages,
        ),
        (
            "late_messages",
            "Messages to the reaper from workers that had already ended; they are dropped.",
            lambda s: s.slot.late_messages,
        ),
    )
    for name, what, number in numbers:
        family = CounterMetricFamily(f"mayfly_worker_{name}", what, labels=SLOT_LABELS)
        for record in records:
            family.add_metric(_labels(node, record), number(record))
        yield family
    restarts = CounterMetricFamily(
        "mayfly_worker_restarts",
        "Workers that ended while their node kept running, by reason.",
        labels=[*SLOT_LABELS, "reason"],
    )
    faults = CounterMetricFamily(
        "mayfly_faults",
        "Faults of workers, by kind of fault and by scope (how much was lost with it).",
        labels=[*SLOT_LABELS, "kind", "scope"],
    )
    for record in records:
        own = _labels(node, record)
        for reason in RESTART_REASONS:
            restarts.add_metric([*own, reason], record.counted.restarts.get(reason, 0))
        for (kind, scope), count in (_ALWAYS_SHOWN | dict(record.counted.faults)).items():
            faults.add_metric([*own, kind, scope], count)
    yield from (restarts, faults)


def _histograms(node: str, records: list[SlotRecord]) -> Iterator[Metric]:
    def total(name: str) -> Callable[[SlotCounters], Distribution]:
        return lambda a: getattr(a.total, name)

    tables: tuple[
        tuple[str, str, tuple[float, ...], Callable[[SlotCounters], Distribution]], ...
    ] = (
        (
            "load_seconds",
            "Duration from the start of a worker until it is ready for requests.",
            LOAD_BOUNDS_S,
            lambda a: a.loads,
        ),
        (
            "recovery_seconds",
            "Duration from the loss of a worker until its slot has a ready worker again.",
            RECOVERY_BOUNDS_S,
            lambda a: a.recoveries,
        ),
        *(
            (metric.name, metric.help, STEP_BOUNDS_S, total(name))
            for name, metric in counters.metrics("histogram").items()
        ),
    )
    for name, what, bounds, of in tables:
        family = HistogramMetricFamily(f"mayfly_worker_{name}", what, labels=SLOT_LABELS)
        for record in records:
            found = of(record.counted)
            family.add_metric(_labels(node, record), _buckets(found, bounds), found.sum)
        yield family


def _buckets(found: Distribution, bounds: tuple[float, ...]) -> list[tuple[str, float]]:
    counts = found.counts or (0,) * (len(bounds) + 1)
    names = [*map(str, bounds), "+Inf"]
    return list(zip(names, map(float, accumulate(counts)), strict=True))


def _states(node: str, records: list[SlotRecord]) -> Iterator[Metric]:
    states = GaugeMetricFamily(
        "mayfly_worker_state",
        "Workers of the slot in each state; if it has no worker, 1 for the slot's own state.",
        labels=[*SLOT_LABELS, "state"],
    )
    held = GaugeMetricFamily(
        "mayfly_worker_held",
        "1 for the reason why no worker is started in a slot that has none.",
        labels=[*SLOT_LABELS, "reason"],
    )
    for record in records:
        slot, own = record.slot, _labels(node, record)
        now = [worker.state for _, worker in slot.workers]
        now += [slot.idle_state] if slot.current is None else []
        for state in STATES:
            states.add_metric([*own, state], now.count(state))  # type: ignore[arg-type]
        for cause in HOLD_CAUSES:
            held.add_metric([*own, cause], int(slot.current is None and slot.defer_cause == cause))
    yield from (states, held)


def _gauges(node: str, records: list[SlotRecord], now: float) -> Iterator[Metric]:
    """Yields the gauges of each slot's current worker (a slot without a worker has none), and the
    memory of all workers."""

    def value(name: str) -> Callable[[Incarnation, Beat, Pool], float]:
        return lambda w, b, p: float(getattr(b, name))

    numbers: tuple[tuple[str, str, Callable[[Incarnation, Beat, Pool], float]], ...] = (
        (
            "age_seconds",
            "Time since the start of the slot's current worker.",
            lambda w, b, p: now - w.spawned_at,
        ),
        (
            "heartbeat_age_seconds",
            "Time since the last message of the slot's current worker.",
            lambda w, b, p: now - w.last_message_at,
        ),
        (
            "progress_age_seconds",
            "Time since the slot's current worker last made progress or had nothing to do.",
            lambda w, b, p: now - w.last_progress_at,
        ),
        (
            "inferences_budget",
            "Finished answers after which the worker is replaced by a new one; 0: never.",
            lambda w, b, p: inference_budget(w, p.lifetime),
        ),
        *(
            (metric.name, metric.help, value(name))
            for name, metric in counters.metrics("gauge").items()
        ),
    )
    lives = [(s, s.slot.current) for s in records if s.slot.current is not None]
    for name, what, number in numbers:
        family = GaugeMetricFamily(f"mayfly_worker_{name}", what, labels=SLOT_LABELS)
        for record, worker in lives:
            shown = number(worker, worker.beat or _NO_BEAT, record.pool)
            family.add_metric(_labels(node, record), shown)
        yield family
    memory = GaugeMetricFamily(
        "mayfly_worker_memory_bytes",
        "Memory of the slot's workers: of their processes (footprint), and as MLX reports it.",
        labels=[*SLOT_LABELS, "kind"],
    )
    for record in records:
        for kind, size in _memory(record.slot).items():
            memory.add_metric([*_labels(node, record), kind], size)
    yield memory


def _memory(slot: Slot) -> Mapping[str, int]:
    """Returns the memory of a slot's workers in bytes, by kind of memory; a slot has two workers
    while one replaces the other."""
    all_of_them = [worker.beat.memory for _, worker in slot.workers if worker.beat is not None]
    return {
        kind: sum(getattr(memory, kind) for memory in all_of_them) for kind in counters.MEMORY_KINDS
    }


def _machine(node: str, room: MachineMemory) -> Metric:
    family = GaugeMetricFamily(
        "mayfly_node_memory_bytes",
        "Memory of the machine: available, and wired where the system reports it.",
        labels=["node", "kind"],
    )
    family.add_metric([node, "available"], room.available)
    if room.wired is not None:
        family.add_metric([node, "wired"], room.wired)
    return family


@contextmanager
def metrics_served(metrics: NodeMetrics, host: str, port: int) -> Iterator[None]:
    """Serves the metrics over HTTP inside a ``with`` block, on threads of its own: a slow or
    hostile client takes none of the reaper's time. Raises StartError if the address cannot be
    listened on."""
    try:
        server, thread = start_http_server(port, host, metrics.registry)
    except OSError as error:
        raise StartError(
            f"cannot serve metrics on {host} port {port}: "
            f"{error.strerror or error}; choose another one with --metrics-port"
        ) from error
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class RefusalTotals:
    """Numbers of connections and messages that a node's sockets have refused, by reason: the sum
    over the reaper's own sockets (``own``, a mapping whose numbers grow) and the sockets of all
    workers, including workers that have ended."""

    def __init__(self, own: Mapping[str, int]) -> None:
        self._own = own
        self._running: dict[int, Counter[str]] = {}
        self._ended: Counter[str] = Counter()

    def report(self, incarnation: int, counts: Mapping[str, int]) -> None:
        """Takes in the numbers of connections and messages that a running worker has refused since
        its start, by reason. No number falls, even if an older report comes after a newer one."""
        if counts:
            known = self._running.setdefault(incarnation, Counter())
            known |= Counter(counts)

    def end(self, incarnation: int) -> None:
        """Keeps the last numbers that a worker has reported, because the worker has ended."""
        self._ended += self._running.pop(incarnation, Counter())

    def total(self) -> dict[str, int]:
        everything = Counter(self._own) + self._ended
        for counts in self._running.values():
            everything += counts
        return dict(everything)
