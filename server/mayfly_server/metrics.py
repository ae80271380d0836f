"""Metrics of a front end, for Prometheus. ``docs/metrics.md`` lists all of them.

Metrics that vLLM has, too, have vLLM's names after the prefix ``mayfly_``, so that dashboards need
few changes. Labels have few values each: served models, routes, and reasons from fixed lists. A
label value that a client or worker sent and that is in no list is replaced by ``other``.
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
"""Value of the label ``by`` for messages and peers that this front end itself refused."""
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
    """The metrics of one front end. They have a registry of their own, so that one process can run
    several front ends."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._models: dict[str, ModelMetrics] = {}
        # HTTP requests
        self.http_requests = self._counter(
            "http_requests", "HTTP requests answered, by route and status.", "route", "status"
        )
        self._rejections = self._counter(
            "rejections", "HTTP requests answered with an error, by kind of error.", "reason"
        )
        self.requests = self._counter(
            "requests",
            "Requests for generated text that have ended, by outcome: an HTTP status, cancelled "
            "(client disconnected) or slow (client read too slowly).",
            *("model", "outcome"),
        )
        # Prompts: a request has one or several
        self.running = self._gauge(
            "num_requests_running",
            "Prompts in prefill or decoding, or interrupted by the loss of their worker.",
            "model",
        )
        self.waiting = self._gauge(
            "num_requests_waiting",
            "Prompts that wait for a worker to begin their prefill.",
            "model",
        )
        self.success = self._counter(
            "request_success",
            "Choices generated to their end without an error, by finish reason.",
            "model",
            "finished_reason",
        )
        self.prompt_tokens = self._counter(
            "prompt_tokens", "Tokens in the prompts that workers accepted.", "model"
        )
        self.cached_tokens = self._counter(
            "prompt_tokens_cached",
            "Prompt tokens found in the prefix cache, of prompts that ended without an error.",
            "model",
        )
        self.generation_tokens = self._counter(
            "generation_tokens", "Generated tokens sent to clients.", "model"
        )
        self.ttft = self._histogram(
            "time_to_first_token_seconds",
            "Time from a request's arrival to the first token generated for a prompt.",
            _FIRST_TOKEN_S,
        )
        self.inter_token = self._histogram(
            "inter_token_latency_seconds",
            "Time between two tokens of a choice, including interruptions by the loss of a worker.",
            _TOKEN_S,
        )
        self.latency = self._histogram(
            "e2e_request_latency_seconds",
            "Time from a request's arrival to the end of a prompt's generation without an error.",
            _REQUEST_S,
        )
        self.queue_time = self._histogram(
            "request_queue_time_seconds",
            "Time from a request's arrival until a worker begins the prefill of a prompt.",
            _REQUEST_S,
        )
        # Attempts: a prompt is tried on another worker if its worker is lost
        self.attempts = self._counter(
            "request_attempts",
            "Prompts submitted to a worker; one is submitted again if its worker is lost.",
            "model",
        )
        self.retries = self._counter(
            "request_retries",
            "Submissions of prompts that ended before a worker had accepted the prompt, by reason.",
            *("model", "reason"),
        )
        self.continuations = self._counter(
            "continuations",
            "Prompts that another worker had to continue because theirs was lost, or stopped and "
            "gave them back unfinished, by phase then (queued, prefill, decode) and reason.",
            *("model", "phase", "reason"),
        )
        self.interruption = self._histogram(
            "interruption_seconds",
            "Time from the loss of a worker until another worker continues its prompt.",
            _INTERRUPTION_S,
        )
        self._quarantined = self._counter(
            "quarantined",
            "Prompts put into quarantine because they made workers fail, by kind of fault.",
            *("model", "kind"),
        )
        self._refused = self._counter(
            "quarantine_refusals",
            "Prompts refused because they made workers fail before (quarantine), by kind of fault.",
            *("model", "kind"),
        )
        self.messages = self._counter(
            "messages", "Messages that workers sent about the prompts submitted to them."
        )
        self.late = self._counter(
            "late_messages",
            "Messages from workers about prompts that had already ended on that worker; they are "
            "dropped.",
        )
        # Nodes' own metrics, where /metrics includes them
        self.scrapes = self._counter(
            "node_scrapes", "Requests of this front end to nodes for their metrics."
        )
        self.scrape_failures = self._counter(
            "node_scrape_failures",
            "Requests of this front end to nodes for their metrics that were not answered in time.",
        )
        self.wire_refusals = self._counter(
            "wire_refusals",
            "Connections and messages refused between nodes and front ends, by refusing process (a "
            "node's address, or this front end) and reason.",
            "by",
            "reason",
        )

    def of(self, model: str) -> ModelMetrics:
        """The time series of one served model; made at the first call for the model."""
        found = self._models.get(model)
        if found is None:
            found = self._models[model] = ModelMetrics(self, model)
        return found

    def rejected(self, error: RequestError) -> None:
        """Counts a request that was answered with an error."""
        self._rejections.labels(reason_of(error)).inc()

    def quarantined(self, model: str, kind: str) -> None:
        """Counts a prompt that was put into quarantine (is refused from now on), because it made
        workers fail by this kind of fault."""
        self._quarantined.labels(model, fault(kind)).inc()

    def refused(self, model: str, kind: str) -> None:
        """Counts a prompt that was refused because it had made workers fail before, by this kind of
        fault."""
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
    """One model's time series. They are looked up by their labels once, because counting a token
    must be cheap. Series that will surely be needed exist from the start with the value 0, so that
    Prometheus sees the first increase."""

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
    """The label value for the reason why a worker did not end a prompt; ``other`` if it is in no
    list."""
    name = why.replace(" ", "_")
    return name if name in _CAUSES else fault(name)


def fault(kind: str) -> str:
    """The label value for the kind of fault that a worker names; ``other`` if the kind is not
    known."""
    return kind if kind in KINDS else "other"


def reason_of(error: RequestError) -> str:
    """The label value for an error, made from its class: ``model_not_found`` for
    ``ModelNotFound``."""
    if type(error) is RequestError:
        return "internal_error"
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(error).__name__).lower()


class PromptMetrics:
    """Counts the steps of one prompt from its arrival to its end::

        arrived --> waiting --first sign of work--> running ----------> ended
                     |   ^                           |   ^
                     +---+ retried, continued        +---+ continued: interrupted until the next
                                                           worker goes on with it

    An instance is made when the request arrives; :meth:`ended` has to be called in any case.
    ``clock`` returns seconds. The methods that are called for each token look up no labels.
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
        """Counts a prompt that begins to wait for a worker."""
        if not self._counted:
            self._counted = True
            self._metrics.waiting.inc()

    def submitted(self) -> None:
        """Counts a submission of the prompt to a worker."""
        self._metrics.attempts.inc()

    def accepted(self, prompt_tokens: int) -> None:
        """Counts the prompt's tokens when a worker has accepted it; only the first call counts."""
        if not self._accepted:
            self._accepted = True
            self._metrics.prompt_tokens.inc(prompt_tokens)

    def progressed(self) -> None:
        """Counts the begin of the prompt's prefill on a worker, or the end of an interruption by
        the loss of a worker."""
        if not self._began:
            self._began = True
            self._metrics.queue_time.observe(self._clock() - self._arrived_at)
            self._metrics.waiting.dec()
            self._metrics.running.inc()
        if self._lost_at is not None and not self._token_at:
            self._resumed(self._clock())

    def generated(self, delta: Delta) -> None:
        """Counts tokens that a worker has generated for a choice, and the end of the choice."""
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
        """Counts, by ``cause``, that a worker did not accept the prompt, which is then submitted to
        another worker."""
        self._metrics.retried(cause)

    def continued(self, cause: str) -> None:
        """Counts that the worker of an accepted prompt was lost or gave it back, so that another
        worker has to continue it."""
        phase = "decode" if self._token_at else "prefill" if self._began else "queued"
        self._metrics.continued(phase, cause)
        if self._lost_at is None:
            self._lost_at = self._clock()

    def ended(self, usage: Usage | None) -> None:
        """Counts the end of the prompt, without an error if ``usage`` is given. Only the first call
        counts."""
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
    """Adds up the numbers of connections and messages that nodes and this front end refused, in a
    counter with the labels (who refused, reason). The sources report totals since their start."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._last: dict[str, tuple[str, Mapping[str, int]]] = {}

    def take(self, source: str, epoch: str, counts: Mapping[str, int]) -> None:
        """Adds the increase of a source's totals (by reason) since the last call. ``epoch`` is
        another text when the source has restarted, so that its totals begin at 0 again."""
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
