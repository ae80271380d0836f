"""Counters of a worker, each declared once: its wire name, its Prometheus metric, its HELP text.

The worker writes the counters. Its heartbeat message ``Beat`` carries all of them to the reaper
(the supervisor of the workers), and the reaper publishes those of :class:`PublishedCounters` to
front ends in ``SlotView``. The reaper's Prometheus metrics, ``/mayfly/status`` and its schema are
derived from the fields, so that a new counter needs only a field in this module and a line in the
worker that writes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from mayfly_protocol.common.histogram import NOTHING, Distribution


@dataclass(frozen=True, slots=True)
class WorkerMetric:
    """A Prometheus metric ``mayfly_worker_NAME`` made of one field of a worker's counters. When a
    worker is replaced by another, a counter or histogram goes on from the old value; a gauge is
    that of the worker that serves now."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str


def _counter(name: str, help: str) -> WorkerMetric:
    return WorkerMetric(name, "counter", help)


def _gauge(name: str, help: str) -> WorkerMetric:
    return WorkerMetric(name, "gauge", help)


def _histogram(name: str, help: str) -> WorkerMetric:
    """Declares a histogram metric of times in seconds, with the buckets for the duration of a
    forward pass."""
    return WorkerMetric(name, "histogram", help)


def _metrics(*metrics: WorkerMetric, status: bool = False) -> dict[str, Any]:
    return {"metrics": metrics, "status": status}


def _number(*metrics: WorkerMetric, status: bool = False) -> Any:
    """Declares an integer field with its metrics. ``status`` is True if ``/mayfly/status`` shows
    the field under its name."""
    return field(default=0, metadata=_metrics(*metrics, status=status))


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a worker, in bytes. ``footprint`` is that of the process (the resident set on
    Linux); ``active``, ``cache`` and ``peak`` are as MLX reports them. ``prefix_cache`` are the KV
    caches kept for later prompts. ``device_free`` is the unused memory of a device that has memory
    of its own, None for other devices."""

    footprint: int = 0
    active: int = 0
    cache: int = 0
    peak: int = 0
    prefix_cache: int = 0
    device_free: int | None = None


@dataclass(slots=True, kw_only=True)
class PublishedCounters:
    """Counters of a worker that its node publishes to every front end.

    ``waiting`` counts admitted requests whose prefill has not begun. ``waiting_tokens`` counts
    their prompt tokens, without the prompts that are not tokenized yet. The class is not frozen,
    since a worker writes into its own copy; a copy in a message is never changed.
    """

    inferences: int = _number(
        _counter("inferences", "Answers finished; a request with n=2 has two."),
        _gauge("inferences_since_start", "Answers that the current worker has finished."),
        status=True,
    )
    generated_tokens: int = _number(
        _counter("generated_tokens", "Tokens sampled, including those of self-tests."), status=True
    )
    running: int = _number(
        _gauge("requests_running", "Requests in prefill or decoding now."), status=True
    )
    waiting: int = _number(
        _gauge("requests_waiting", "Requests in the worker's queue now."), status=True
    )
    waiting_tokens: int = _number()
    memory: Memory = field(default_factory=Memory)


@dataclass(slots=True, kw_only=True)
class WorkerCounters(PublishedCounters):
    """All counters of one worker process since its start.

    ``preparing`` counts the ``waiting`` requests that are still being tokenized, so that the engine
    does not have them yet. ``kv_bytes`` and ``kv_budget`` are bytes of KV caches: taken by all
    sequences, and allowed for them. ``refused`` counts, by reason, the connections and messages
    that the worker's socket refused.
    """

    prompt_tokens: int = _number(
        _counter("prompt_tokens", "Prompt tokens of requests whose prefill has begun.")
    )
    cached_tokens: int = _number(
        _counter(
            "prompt_tokens_cached",
            "Prompt tokens that were found in the prefix cache and not computed again.",
        )
    )
    rows: int = _number(_gauge("batch_rows", "Sequences that are decoded together now."))
    kv_bytes: int = _number(
        _gauge(
            "kv_bytes",
            "Bytes of the KV caches of all running sequences, each counted at the length of the "
            "longest in its batch.",
        )
    )
    kv_budget: int = _number(
        _gauge(
            "kv_budget_bytes",
            "Largest number of bytes that the KV caches of all running sequences may take.",
        )
    )
    prefill_lengths: int = _number(
        _gauge(
            "prefill_lengths",
            "Number of different lengths of prefill chunks since the worker's start; for each "
            "new length, kernels are compiled or planned anew.",
        )
    )
    decode_s: Distribution = field(
        default=NOTHING,
        metadata=_metrics(
            _histogram("decode_step_seconds", "Duration of one decode step of the whole batch."),
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
        """Returns every counter by the name of its field."""
        return {each.name: getattr(self, each.name) for each in fields(WorkerCounters)}

    def totals(self) -> WorkerCounters:
        """Returns the fields that become Prometheus counters or histograms, with all other fields
        at their defaults."""
        return WorkerCounters(**{name: getattr(self, name) for name in SUMMED})

    def plus(self, other: WorkerCounters) -> WorkerCounters:
        """Returns the sums of the fields that become Prometheus counters or histograms, with all
        other fields at their defaults."""
        return WorkerCounters(
            **{name: _sum(getattr(self, name), getattr(other, name)) for name in SUMMED}
        )

    def fell_from(self, before: WorkerCounters) -> bool:
        """True if any Prometheus counter or histogram is smaller than in the earlier report
        ``before``."""
        return any(_count(getattr(self, name)) < _count(getattr(before, name)) for name in SUMMED)


def metrics(kind: Literal["counter", "gauge", "histogram"]) -> dict[str, WorkerMetric]:
    """Returns the metrics of one Prometheus type, by the name of the field that each metric
    shows."""
    return {
        each.name: metric
        for each in fields(WorkerCounters)
        for metric in each.metadata.get("metrics", ())
        if metric.kind == kind
    }


PUBLISHED = tuple(each.name for each in fields(PublishedCounters))
"""Names of the counters in both the heartbeat message ``Beat`` and the published ``SlotView``."""
STATUS = {
    each.name: each.metadata["metrics"][0].help
    for each in fields(PublishedCounters)
    if each.metadata.get("status")
}
"""HELP texts of the counters that ``/mayfly/status`` shows, by the names of the counters."""
MEMORY_KINDS = tuple(each.name for each in fields(Memory) if each.name != "device_free")
"""Values of the ``kind`` label of ``mayfly_worker_memory_bytes``."""
SUMMED = (*metrics("counter"), *metrics("histogram"))
"""Names of the counters that only grow; they are added up over the workers that follow each other
in a slot (a node's place for one worker at a time)."""


def _sum(one: Any, other: Any) -> Any:
    return one.plus(other) if isinstance(one, Distribution) else one + other


def _count(value: int | Distribution) -> int:
    return value.count if isinstance(value, Distribution) else value
