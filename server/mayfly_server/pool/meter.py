"""What one prompt adds to the metrics on its way.

::

    arrived --> waiting --first sign of work--> running ----------> ended
                 |   ^                           |   ^
                 +---+ retried, continued        +---+ continued: interrupted until the next
                                                       worker goes on with it

The relay says what happens; a clock in seconds is injected. What is called for every token does no
look-up by labels.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from mayfly_protocol.serving import Delta, Usage
from mayfly_server.metrics import ModelMetrics


class Meter:
    """Made when the request arrives; :meth:`arrived` when somebody waits for the prompt, and
    :meth:`ended` in any case."""

    __slots__ = (
        "_accepted",
        "_arrived_at",
        "_began",
        "_clock",
        "_here",
        "_lost_at",
        "_metrics",
        "_token_at",
    )

    def __init__(self, metrics: ModelMetrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._arrived_at = clock()
        self._here = self._accepted = self._began = False
        self._token_at: dict[int, float] = {}
        self._lost_at: float | None = None

    def arrived(self) -> None:
        if not self._here:
            self._here = True
            self._metrics.waiting.inc()

    def submitted(self) -> None:
        self._metrics.attempts.inc()

    def accepted(self, prompt_tokens: int) -> None:
        """By a worker; only the first one's acceptance counts."""
        if not self._accepted:
            self._accepted = True
            self._metrics.prompt_tokens.inc(prompt_tokens)

    def progressed(self) -> None:
        """A worker has begun with it, or goes on."""
        if not self._began:
            self._began = True
            self._metrics.queue_time.observe(self._clock() - self._arrived_at)
            self._metrics.waiting.dec()
            self._metrics.running.inc()
        if self._lost_at is not None and not self._token_at:
            self._resumed(self._clock())

    def generated(self, delta: Delta) -> None:
        """A worker has drawn tokens, or ended a choice."""
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
        """Well, with a usage; or not. Only the first time counts."""
        if not self._here:
            return
        self._here = False
        (self._metrics.running if self._began else self._metrics.waiting).dec()
        if usage is not None:
            self._metrics.cached_tokens.inc(usage.cached_tokens)
            self._metrics.latency.observe(self._clock() - self._arrived_at)

    def _resumed(self, now: float) -> None:
        if self._lost_at is not None:
            self._metrics.interruption.observe(now - self._lost_at)
            self._lost_at = None
