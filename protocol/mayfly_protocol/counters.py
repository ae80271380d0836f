"""Counters of a worker, each declared once: its wire name, its metric, its HELP text.

The worker writes them, ``Beat`` carries all of them to the reaper, ``SlotView`` those of
:class:`PublishedCounters` on to front ends. The reaper's Prometheus metrics, ``/mayfly/status`` and
its schema are derived from the fields, so that a new counter takes a field here and the line of the
worker that writes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from mayfly_protocol.common.histogram import NOTHING, Distribution


@dataclass(frozen=True, slots=True)
class WorkerMetric:
    """A Prometheus metric ``mayfly_worker_NAME`` of one field. A counter or histogram goes on from
    one worker of a slot to the next; a gauge is of the worker that serves now."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str


def _counter(name: str, help: str) -> WorkerMetric:
    return WorkerMetric(name, "counter", help)


def _gauge(name: str, help: str) -> WorkerMetric:
    return WorkerMetric(name, "gauge", help)


def _histogram(name: str, help: str) -> WorkerMetric:
    """Over ``STEP_BOUNDS_S``."""
    return WorkerMetric(name, "histogram", help)


def _metrics(*metrics: WorkerMetric, status: bool = False) -> dict[str, Any]:
    return {"metrics": metrics, "status": status}


def _number(*metrics: WorkerMetric, status: bool = False) -> Any:
    """An integer field. ``status`` says that ``/mayfly/status`` shows it under the same name."""
    return field(default=0, metadata=_metrics(*metrics, status=status))


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes. ``footprint`` is the process's own (resident set on Linux); the others are MLX's.
    ``device_free`` is unused memory of a device that has memory of its own, None elsewhere."""

    footprint: int = 0
    active: int = 0
    cache: int = 0
    peak: int = 0
    prefix_cache: int = 0
    device_free: int | None = None


@dataclass(slots=True, kw_only=True)
class PublishedCounters:
    """Counters that the node's roster shows to every front end.

    ``waiting`` are requests admitted and not yet prefilling, ``waiting_tokens`` the tokens of
    their prompts. Not frozen, since the worker writes into its own copy; nobody changes a message.
    """

    inferences: int = _number(
        _counter("inferences", "Choices finished."),
        _gauge("inferences_since_start", "Choices finished by the current worker."),
        status=True,
    )
    generated_tokens: int = _number(
        _counter("generated_tokens", "Tokens sampled, those of the canary included."), status=True
    )
    running: int = _number(
        _gauge("requests_running", "Requests that have left the worker's queue."), status=True
    )
    waiting: int = _number(
        _gauge("requests_waiting", "Requests in the worker's queue."), status=True
    )
    waiting_tokens: int = _number()
    memory: Memory = field(default_factory=Memory)


@dataclass(slots=True, kw_only=True)
class WorkerCounters(PublishedCounters):
    """All counters of one worker, from its start on.

    Of the requests in ``waiting``, the engine has not been given those that are still
    ``preparing``. ``kv_bytes`` and ``kv_budget`` are as admission counts them. ``refused`` counts,
    by reason, what peers were refused at the worker's socket.
    """

    prompt_tokens: int = _number(
        _counter("prompt_tokens", "Prompt tokens of requests whose prefill has begun.")
    )
    cached_tokens: int = _number(
        _counter("prompt_tokens_cached", "Prompt tokens that were found in the prefix cache.")
    )
    rows: int = _number(_gauge("batch_rows", "Sequences that are decoded together."))
    kv_bytes: int = _number(
        _gauge("kv_bytes", "Bytes of the KV caches of all sequences, as admission counts them.")
    )
    kv_budget: int = _number(
        _gauge("kv_budget_bytes", "Bytes that the KV caches of all sequences may take.")
    )
    prefill_lengths: int = _number(
        _gauge(
            "prefill_lengths",
            "Different lengths of prompt chunks since the worker's start; each one compiles or "
            "plans kernels anew.",
        )
    )
    decode_s: Distribution = field(
        default=NOTHING,
        metadata=_metrics(
            _histogram("decode_step_seconds", "Duration of one decode step of all sequences."),
        ),
    )
    prefill_s: Distribution = field(
        default=NOTHING,
        metadata=_metrics(
            _histogram(
                "prefill_chunk_seconds",
                "Duration of the prefill of one chunk of one or several prompts.",
            ),
        ),
    )
    preparing: int = _number()
    refused: dict[str, int] = field(default_factory=dict)

    def values(self) -> dict[str, Any]:
        """Every counter by its name."""
        return {each.name: getattr(self, each.name) for each in fields(WorkerCounters)}

    def totals(self) -> WorkerCounters:
        """The counters and histograms alone, all other fields at their defaults."""
        return WorkerCounters(**{name: getattr(self, name) for name in SUMMED})

    def plus(self, other: WorkerCounters) -> WorkerCounters:
        """The totals of both together."""
        return WorkerCounters(
            **{name: _sum(getattr(self, name), getattr(other, name)) for name in SUMMED}
        )

    def fell_from(self, before: WorkerCounters) -> bool:
        """True if any counter or histogram is smaller than it was."""
        return any(_count(getattr(self, name)) < _count(getattr(before, name)) for name in SUMMED)


def metrics(kind: Literal["counter", "gauge", "histogram"]) -> dict[str, WorkerMetric]:
    """The metrics of one kind, by the name of their field."""
    return {
        each.name: metric
        for each in fields(WorkerCounters)
        for metric in each.metadata.get("metrics", ())
        if metric.kind == kind
    }


PUBLISHED = tuple(each.name for each in fields(PublishedCounters))
"""Names of the fields that ``Beat`` and ``SlotView`` share."""
STATUS = {
    each.name: each.metadata["metrics"][0].help
    for each in fields(PublishedCounters)
    if each.metadata.get("status")
}
"""Counters that ``/mayfly/status`` shows, with their HELP texts."""
MEMORY_KINDS = tuple(each.name for each in fields(Memory) if each.name != "device_free")
"""Values of the ``kind`` label of ``mayfly_worker_memory_bytes``."""
SUMMED = (*metrics("counter"), *metrics("histogram"))
"""Names of the fields that only grow, and are added up over the workers of a slot."""


def _sum(one: Any, other: Any) -> Any:
    return one.plus(other) if isinstance(one, Distribution) else one + other


def _count(value: int | Distribution) -> int:
    return value.count if isinstance(value, Distribution) else value
