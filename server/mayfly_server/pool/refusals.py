"""What peers were refused on the wire, here and at every node, for Prometheus."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from prometheus_client import Counter

from mayfly_protocol.doorkeeper import Reason

HERE = "front end"
_REASONS = get_args(Reason)


class RefusalCounts:
    """Adds to a counter with the labels (who refused, reason) what counts that only grow have grown
    by. ``epoch`` tells a source that was started again, and counts from nothing, from itself."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._last: dict[str, tuple[str, Mapping[str, int]]] = {}

    def take(self, source: str, epoch: str, counts: Mapping[str, int]) -> None:
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
