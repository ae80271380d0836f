"""Counters and state that the engine thread writes and other threads may read at any time."""

from __future__ import annotations

from dataclasses import dataclass, field

from mayfly_protocol.breadcrumb import Breadcrumb
from mayfly_protocol.counters import WorkerCounters
from mayfly_protocol.lifecycle import WorkPhase

IDLE = Breadcrumb("idle", 0)


@dataclass(slots=True, kw_only=True)
class EngineCounters(WorkerCounters):
    """Counters of a worker as its engine writes them; an engine that replaces a failed one goes on
    with the same object. Fields about requests stay at 0: the main thread sets them in each
    heartbeat."""

    phase: WorkPhase = "idle"
    progress: int = 0
    steps: int = 0
    """Decode steps since the worker started."""
    chunk_lengths: set[int] = field(default_factory=set)
    """The different lengths, in tokens a row, that prefill chunks have had; ``prefill_lengths`` is
    their number."""
    forward: Breadcrumb = IDLE
    """Phase and requests of the forward pass that is running, or ran last."""
