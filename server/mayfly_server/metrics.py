"""Metrics of a front end, for Prometheus. ``docs/metrics.md`` lists all of them.

Names end as vLLM's do where they mean the same, so that dashboards carry over. Labels take few
values each: models that are served, routes, and reasons out of closed lists. A value that comes
from a client or a worker and is in no list is ``other``.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import Final, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from mayfly_protocol.faults import KINDS
from mayfly_protocol.requests import FinishReason
from mayfly_protocol.serving import Delta, Usage
from mayfly_protocol.transport.zap import Reason
from mayfly_server.errors import RequestError

# A counter's creation time would double the number of series; Prometheus finds resets itself.
disable_created_metrics()  # type: ignore[no-untyped-call]

THIS_FRONT_END = "front end"
"""The label for the refusals of this front end itself."""
PHASES: Final = ("queued", "prefill", "decode")
FINISHED: Final[tuple[FinishReason, ...]] = ("stop", "length", "tool_calls")
_REASONS = get_args(Reason)
_CAUSES = frozenset(
    {
        *("lost", "stalled", "gap", "out_of_turn", "cut_short", "cancelled"),
        *("drain", "leaving", "full"),
    }
)

_FIRST_TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5),
    *(5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
_TOKEN_S = (
    *(0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3),
    *(0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.1, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 3840.0),
)
_INTERRUPTION_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)


class Metrics:
    """The metrics of one front end, in a registry of its own: several may run in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._models: dict[str, ModelMetrics] = {}
        # HTTP requests
        self.http_requests = self._counter(
            "http_requests", "HTTP requests answered, by status.", "route", "status"
        )
        self._rejections = self._counter(
            "rejections", "HTTP requests answered with an error, by error.", "reason"
        )
        self.requests = self._counter(
            "requests",
            "Requests to generate that have ended, by outcome: an HTTP status, cancelled or slow.",
            *("model", "outcome"),
        )
        # Prompts: a request has one or several
        self.running = self._gauge(
            "num_requests_running", "Prompts that a worker is working on.", "model"
        )
        self.waiting = self._gauge(
            "num_requests_waiting", "Prompts that no worker has begun to work on.", "model"
        )
        self.success = self._counter(
            "request_success",
            "Choices that have ended without an error, by finish reason.",
            "model",
            "finished_reason",
        )
        self.prompt_tokens = self._counter(
            "prompt_tokens", "Tokens of prompts accepted by a worker.", "model"
        )
        self.cached_tokens = self._counter(
            "prompt_tokens_cached",
            "Prompt tokens found in a prefix cache, of prompts that ended without an error.",
            "model",
        )
        self.generation_tokens = self._counter(
            "generation_tokens", "Tokens sent to clients.", "model"
        )
        self.ttft = self._histogram(
            "time_to_first_token_seconds",
            "Time from a request's arrival to a prompt's first token.",
            _FIRST_TOKEN_S,
        )
        self.inter_token = self._histogram(
            "inter_token_latency_seconds",
            "Time between two tokens of a choice, interruptions included.",
            _TOKEN_S,
        )
        self.latency = self._histogram(
            "e2e_request_latency_seconds",
            "Time from a request's arrival to the end of a prompt that ended without an error.",
            _REQUEST_S,
        )
        self.queue_time = self._histogram(
            "request_queue_time_seconds",
            "Time from a request's arrival until a worker begins to work on a prompt.",
            _REQUEST_S,
        )
        # Attempts: prompts move when workers are lost
        self.attempts = self._counter(
            "request_attempts", "Attempts: submissions of a prompt to a worker.", "model"
        )
        self.retries = self._counter(
            "request_retries",
            "Attempts that ended before a worker had accepted the prompt, by reason.",
            *("model", "reason"),
        )
        self.continuations = self._counter(
            "continuations",
            "Attempts continued by another one after the prompt had been accepted, by phase and "
            "reason.",
            *("model", "phase", "reason"),
        )
        self.interruption = self._histogram(
            "interruption_seconds",
            "Time from the loss of a worker until another one continues its prompt.",
            _INTERRUPTION_S,
        )
        self._quarantined = self._counter(
            "quarantined",
            "Prompts ended because they were to blame for the faults of workers, by kind of fault.",
            *("model", "kind"),
        )
        self._refused = self._counter(
            "quarantine_refusals",
            "Prompts refused because they are in quarantine, by kind of fault.",
            *("model", "kind"),
        )
        self.messages = self._counter(
            "messages", "Messages that workers sent about the prompts submitted to them."
        )
        self.late = self._counter(
            "late_messages",
            "Messages from workers about attempts that had already ended; they are dropped.",
        )
        # Nodes' own metrics, where /metrics includes them
        self.scrapes = self._counter("node_scrapes", "Requests to nodes for their metrics.")
        self.scrape_failures = self._counter(
            "node_scrape_failures",
            "Requests to nodes for their metrics not answered in time.",
        )
        self.wire_refusals = self._counter(
            "wire_refusals",
            "Peers and frames refused on the wire, by the refusing process (a node, or this front "
            "end) and reason.",
            "by",
            "reason",
        )

    def of(self, model: str) -> ModelMetrics:
        """The metrics of one served model."""
        found = self._models.get(model)
        if found is None:
            found = self._models[model] = ModelMetrics(self, model)
        return found

    def rejected(self, error: RequestError) -> None:
        """Counts a request that was answered with an error."""
        self._rejections.labels(reason_of(error)).inc()

    def quarantined(self, model: str, kind: str) -> None:
        """Counts a prompt that was put into quarantine."""
        self._quarantined.labels(model, fault(kind)).inc()

    def refused(self, model: str, kind: str) -> None:
        """Counts a prompt that was refused because it is in quarantine."""
        self._refused.labels(model, fault(kind)).inc()

    def exposition(self) -> bytes:
        """All metrics in Prometheus's text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(f"mayfly_{name}", help, labels, registry=self.registry)

    def _gauge(self, name: str, help: str, *labels: str) -> Gauge:
        return Gauge(f"mayfly_{name}", help, labels, registry=self.registry)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"mayfly_{name}", help, ["model"], buckets=buckets, registry=self.registry)


class ModelMetrics:
    """One model's time series, looked up once, for counting a token must be cheap. Series that are
    sure to exist begin at 0, so that Prometheus sees the first increase."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self.running = metrics.running.labels(model)
        self.waiting = metrics.waiting.labels(model)
        self.success = {reason: metrics.success.labels(model, reason) for reason in FINISHED}
        self.prompt_tokens = metrics.prompt_tokens.labels(model)
        self.cached_tokens = metrics.cached_tokens.labels(model)
        self.generation_tokens = metrics.generation_tokens.labels(model)
        self.ttft = metrics.ttft.labels(model)
        self.inter_token = metrics.inter_token.labels(model)
        self.latency = metrics.latency.labels(model)
        self.queue_time = metrics.queue_time.labels(model)
        self.attempts = metrics.attempts.labels(model)
        self.interruption = metrics.interruption.labels(model)
        self._retries = metrics.retries
        self._continuations = metrics.continuations
        self._model = model
        metrics.retries.labels(model, "lost")
        for phase in PHASES:
            metrics.continuations.labels(model, phase, "lost")

    def retried(self, why: str) -> None:
        self._retries.labels(self._model, cause(why)).inc()

    def continued(self, phase: str, why: str) -> None:
        self._continuations.labels(self._model, phase, cause(why)).inc()


def cause(why: str) -> str:
    """The label for the reason that an attempt ended; ``other`` if it is in no list."""
    name = why.replace(" ", "_")
    return name if name in _CAUSES else fault(name)


def fault(kind: str) -> str:
    """The label for a kind of fault that a worker names; ``other`` if it is unknown."""
    return kind if kind in KINDS else "other"


def reason_of(error: RequestError) -> str:
    """The label for an error's class: ``ModelNotFound`` is ``model_not_found``."""
    if type(error) is RequestError:
        return "internal_error"
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(error).__name__).lower()


class PromptMetrics:
    """Counts one prompt on its way, as its relay reports it::

        arrived --> waiting --first sign of work--> running ----------> ended
                     |   ^                           |   ^
                     +---+ retried, continued        +---+ continued: interrupted until the next
                                                           worker goes on with it

    To be made when the request arrives. :meth:`ended` has to be called in any case. ``clock`` is in
    seconds. The methods that are called for every token do no look-up by labels.
    """

    __slots__ = (
        "_accepted",
        "_arrived_at",
        "_began",
        "_clock",
        "_counted",
        "_lost_at",
        "_metrics",
        "_token_at",
    )

    def __init__(self, metrics: ModelMetrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._arrived_at = clock()
        self._counted = self._accepted = self._began = False
        self._token_at: dict[int, float] = {}
        self._lost_at: float | None = None

    def arrived(self) -> None:
        """The prompt begins to wait for a worker."""
        if not self._counted:
            self._counted = True
            self._metrics.waiting.inc()

    def submitted(self) -> None:
        """The prompt was submitted to a worker."""
        self._metrics.attempts.inc()

    def accepted(self, prompt_tokens: int) -> None:
        """A worker has accepted the prompt; only the first acceptance counts."""
        if not self._accepted:
            self._accepted = True
            self._metrics.prompt_tokens.inc(prompt_tokens)

    def progressed(self) -> None:
        """A worker has begun with the prompt, or goes on with it."""
        if not self._began:
            self._began = True
            self._metrics.queue_time.observe(self._clock() - self._arrived_at)
            self._metrics.waiting.dec()
            self._metrics.running.inc()
        if self._lost_at is not None and not self._token_at:
            self._resumed(self._clock())

    def generated(self, delta: Delta) -> None:
        """A worker has generated tokens, or ended a choice."""
        metrics = self._metrics
        if not self._began:
            self.progressed()
        if delta.ids:
            now = self._clock()
            last = self._token_at.get(delta.choice)
            if last is not None:
                metrics.inter_token.observe(now - last)
            elif not self._token_at:
                metrics.ttft.observe(now - self._arrived_at)
            if self._lost_at is not None:
                self._resumed(now)
            self._token_at[delta.choice] = now
            metrics.generation_tokens.inc(len(delta.ids))
        if delta.finish is not None:
            metrics.success[delta.finish].inc()

    def retried(self, cause: str) -> None:
        """An attempt was over before a worker had accepted the prompt."""
        self._metrics.retried(cause)

    def continued(self, cause: str) -> None:
        """An attempt at an accepted prompt was over, and another one follows."""
        phase = "decode" if self._token_at else "prefill" if self._began else "queued"
        self._metrics.continued(phase, cause)
        if self._lost_at is None:
            self._lost_at = self._clock()

    def ended(self, usage: Usage | None) -> None:
        """The prompt has ended: well if there is a usage. Only the first call counts."""
        if not self._counted:
            return
        self._counted = False
        (self._metrics.running if self._began else self._metrics.waiting).dec()
        if usage is not None:
            self._metrics.cached_tokens.inc(usage.cached_tokens)
            self._metrics.latency.observe(self._clock() - self._arrived_at)

    def _resumed(self, now: float) -> None:
        if self._lost_at is not None:
            self._metrics.interruption.observe(now - self._lost_at)
            self._lost_at = None


class RefusalCounts:
    """Adds the growth of the refusal counts of nodes, and of this front end, to a counter with the
    labels (who refused, reason). ``epoch`` changes when a source starts again and counts from 0."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._last: dict[str, tuple[str, Mapping[str, int]]] = {}

    def take(self, source: str, epoch: str, counts: Mapping[str, int]) -> None:
        """Takes a source's present counts, by reason."""
        if source not in self._last:
            for reason in _REASONS:  # at 0, so that the first refusal is seen as an increase
                self._counter.labels(source, reason)
        before, last = self._last.get(source, ("", {}))
        if before != epoch:
            last = {}
        self._last[source] = (epoch, dict(counts))
        for reason, count in counts.items():
            grown = count - last.get(reason, 0)
            if grown > 0:
                known = reason if reason in _REASONS else "other"
                self._counter.labels(source, known).inc(grown)
