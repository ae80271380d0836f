"""What a front end counts, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """One registry a front end, so that several in one process do not share their counts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "mayfly_requests",
            "Requests that have ended, by how: an HTTP status, or cancelled.",
            ["model", "outcome"],
            registry=self.registry,
        )
        self.running = Gauge(
            "mayfly_requests_running",
            "Requests that have not ended, held ones included.",
            registry=self.registry,
        )
        self.ttft = Histogram(
            "mayfly_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            ["model"],
            buckets=_TTFT_BUCKETS_S,
            registry=self.registry,
        )
        self.continuations = Counter(
            "mayfly_continuations",
            "Attempts that took over from another worker, by why that one was left.",
            ["model", "cause"],
            registry=self.registry,
        )
        self.condemned = Counter(
            "mayfly_requests_condemned",
            "Requests that were ended because workers died of them, by what of.",
            ["model", "kind"],
            registry=self.registry,
        )
        self.refused = Counter(
            "mayfly_requests_refused",
            "Requests that were refused because workers had died of their like, by what of.",
            ["model", "kind"],
            registry=self.registry,
        )
        self.late = Counter(
            "mayfly_late_messages",
            "Messages about an attempt that was already over; they are dropped.",
            registry=self.registry,
        )

    def exposition(self) -> bytes:
        """Prometheus's text format."""
        return generate_latest(self.registry)
