"""What a node counts, for Prometheus. ``docs/metrics.md`` lists all of it.

The reaper follows every step of every slot (:mod:`mayfly_reaper.slot_counters`) and a
page is made of
where things stand when somebody asks, on whichever thread that is: slots and accounts are never
changed, only replaced.

Labels take few values each. No process or incarnation has a time series of its own: a slot's go on
from one worker to the next.

How often a node refused somebody something, at all of its sockets together.

``--metrics-port``: a node's metrics over HTTP, on a thread of its own.

A slow or hostile client costs a thread and never the reaper's time: the page is made of snapshots.
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
    Account,
    account,
)


class Tally:
    """Adds up what the reaper counts itself (``own``, which grows) and what its workers report.
    A worker's count goes on counting when it is gone."""

    def __init__(self, own: Mapping[str, int]) -> None:
        self._own = own
        self._living: dict[int, Counter[str]] = {}
        self._gone: Counter[str] = Counter()

    def report(self, incarnation: int, counts: Mapping[str, int]) -> None:
        """What a worker that lives has refused so far. A report that came late takes nothing
        back."""
        if counts:
            known = self._living.setdefault(incarnation, Counter())
            known |= Counter(counts)

    def gone(self, incarnation: int) -> None:
        """A worker that will report no more."""
        self._gone += self._living.pop(incarnation, Counter())

    def total(self) -> dict[str, int]:
        """By reason."""
        everything = Counter(self._own) + self._gone
        for counts in self._living.values():
            everything += counts
        return dict(everything)


SLOT_LABELS = ("node", "slot", "model")
STATES: tuple[str, ...] = get_args(SlotState)
HOLD_CAUSES: tuple[str, ...] = get_args(DeferCause)
_NO_BEAT = Beat(phase="idle", progress=0)
_ALWAYS_SHOWN = {("wedged", "worker"): 0, ("silent", "worker"): 0}
"""Faults whose first one an alert has to see as an increase."""


@dataclass(frozen=True, slots=True)
class Standing:
    """One slot, as it is."""

    pool: Pool
    slot: Slot
    account: Account = field(default_factory=Account)


class NodeMetrics(Collector):
    """A node's page.

    Args:
        room: measures the machine's memory.
        clock: the reaper's, in seconds.
    """

    def __init__(
        self,
        node: str,
        room: Callable[[], MachineMemory],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node = node
        self._room = room
        self._clock = clock
        self._standings: dict[str, Standing] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def begin(self, slot: Slot, pool: Pool) -> None:
        """To be called for every slot before anybody asks for the page."""
        self._standings[slot.name] = Standing(pool, slot)

    def follow(
        self, before: Slot, event: Event, after: Slot, actions: Iterable[Action], now: float
    ) -> None:
        """Takes in a step of a slot's rules."""
        standing = self._standings[after.name]
        counted = account(standing.account, before, event, after, actions, now)
        self._standings[after.name] = replace(standing, slot=after, account=counted)

    def exposition(self) -> bytes:
        """The page, in Prometheus's text format."""
        return generate_latest(self._registry)

    @property
    def registry(self) -> CollectorRegistry:
        return self._registry

    def collect(self) -> Iterator[Metric]:
        standings = list(self._standings.values())
        yield from _counters(self._node, standings)
        yield from _histograms(self._node, standings)
        yield from _states(self._node, standings)
        yield from _gauges(self._node, standings, self._clock())
        yield _machine(self._node, self._room())


def _labels(node: str, standing: Standing) -> list[str]:
    return [node, standing.slot.name, standing.pool.model_name]


def _counters(node: str, standings: list[Standing]) -> Iterator[Metric]:
    def total(name: str) -> Callable[[Standing], int]:
        return lambda s: int(getattr(s.account.total, name))

    numbers: tuple[tuple[str, str, Callable[[Standing], int]], ...] = (
        ("starts", "Workers started.", lambda s: s.account.starts),
        *(
            (metric.name, metric.help, total(name))
            for name, metric in counters.metrics("counter").items()
        ),
        (
            "prefill_tokens",
            "Prompt tokens that were not in the prefix cache and have to be computed.",
            lambda s: s.account.total.prompt_tokens - s.account.total.cached_tokens,
        ),
        ("messages", "Messages from workers to the reaper.", lambda s: s.account.messages),
        (
            "late_messages",
            "Messages from workers that had already ended; they are dropped.",
            lambda s: s.slot.late_messages,
        ),
    )
    for name, what, number in numbers:
        family = CounterMetricFamily(f"mayfly_worker_{name}", what, labels=SLOT_LABELS)
        for standing in standings:
            family.add_metric(_labels(node, standing), number(standing))
        yield family
    restarts = CounterMetricFamily(
        "mayfly_worker_restarts",
        "Workers that ended while their node went on, by reason.",
        labels=[*SLOT_LABELS, "reason"],
    )
    faults = CounterMetricFamily(
        "mayfly_faults",
        "Faults of workers, by kind and scope.",
        labels=[*SLOT_LABELS, "kind", "scope"],
    )
    for standing in standings:
        own = _labels(node, standing)
        for reason in RESTART_REASONS:
            restarts.add_metric([*own, reason], standing.account.restarts.get(reason, 0))
        for (kind, scope), count in (_ALWAYS_SHOWN | dict(standing.account.faults)).items():
            faults.add_metric([*own, kind, scope], count)
    yield from (restarts, faults)


def _histograms(node: str, standings: list[Standing]) -> Iterator[Metric]:
    def total(name: str) -> Callable[[Account], Distribution]:
        return lambda a: getattr(a.total, name)

    tables: tuple[tuple[str, str, tuple[float, ...], Callable[[Account], Distribution]], ...] = (
        (
            "load_seconds",
            "Duration from the start of a worker until it is ready.",
            LOAD_BOUNDS_S,
            lambda a: a.loads,
        ),
        (
            "recovery_seconds",
            "Duration from the loss of a worker until its slot is ready again.",
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
        for standing in standings:
            found = of(standing.account)
            family.add_metric(_labels(node, standing), _buckets(found, bounds), found.sum)
        yield family


def _buckets(found: Distribution, bounds: tuple[float, ...]) -> list[tuple[str, float]]:
    counts = found.counts or (0,) * (len(bounds) + 1)
    names = [*map(str, bounds), "+Inf"]
    return list(zip(names, map(float, accumulate(counts)), strict=True))


def _states(node: str, standings: list[Standing]) -> Iterator[Metric]:
    states = GaugeMetricFamily(
        "mayfly_worker_state",
        "Workers of the slot in each state; without a worker, 1 for the state of the slot.",
        labels=[*SLOT_LABELS, "state"],
    )
    held = GaugeMetricFamily(
        "mayfly_worker_held",
        "1 for the reason why a slot without a worker is not given one.",
        labels=[*SLOT_LABELS, "reason"],
    )
    for standing in standings:
        slot, own = standing.slot, _labels(node, standing)
        now = [worker.state for _, worker in slot.workers]
        now += [slot.idle_state] if slot.current is None else []
        for state in STATES:
            states.add_metric([*own, state], now.count(state))  # type: ignore[arg-type]
        for cause in HOLD_CAUSES:
            held.add_metric([*own, cause], int(slot.current is None and slot.defer_cause == cause))
    yield from (states, held)


def _gauges(node: str, standings: list[Standing], now: float) -> Iterator[Metric]:
    """Of the worker that serves, or is to: a slot without one has no such numbers."""

    def value(name: str) -> Callable[[Incarnation, Beat, Pool], float]:
        return lambda w, b, p: float(getattr(b, name))

    numbers: tuple[tuple[str, str, Callable[[Incarnation, Beat, Pool], float]], ...] = (
        (
            "age_seconds",
            "Time since the start of the worker.",
            lambda w, b, p: now - w.spawned_at,
        ),
        (
            "heartbeat_age_seconds",
            "Time since the worker's last message.",
            lambda w, b, p: now - w.last_message_at,
        ),
        (
            "progress_age_seconds",
            "Time since the worker last made progress, or had nothing to do.",
            lambda w, b, p: now - w.last_progress_at,
        ),
        (
            "inferences_budget",
            "Choices after which the worker is replaced; 0: never.",
            lambda w, b, p: inference_budget(w, p.lifetime),
        ),
        *(
            (metric.name, metric.help, value(name))
            for name, metric in counters.metrics("gauge").items()
        ),
    )
    lives = [(s, s.slot.current) for s in standings if s.slot.current is not None]
    for name, what, number in numbers:
        family = GaugeMetricFamily(f"mayfly_worker_{name}", what, labels=SLOT_LABELS)
        for standing, worker in lives:
            shown = number(worker, worker.beat or _NO_BEAT, standing.pool)
            family.add_metric(_labels(node, standing), shown)
        yield family
    memory = GaugeMetricFamily(
        "mayfly_worker_memory_bytes",
        "Memory of the slot's workers: of their processes (footprint), and as MLX counts it.",
        labels=[*SLOT_LABELS, "kind"],
    )
    for standing in standings:
        for kind, size in _memory(standing.slot).items():
            memory.add_metric([*_labels(node, standing), kind], size)
    yield memory


def _memory(slot: Slot) -> Mapping[str, int]:
    """Of all workers of a slot: there are two while a worn one is replaced."""
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
    """Raises StartError where the address cannot be listened on."""
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
