"""Counters and state that the engine's thread writes and other threads may read at any time."""

from __future__ import annotations

from dataclasses import dataclass, field

from mayfly_protocol.breadcrumb import Breadcrumb
from mayfly_protocol.counters import WorkerCounters
from mayfly_protocol.lifecycle import WorkPhase

IDLE = Breadcrumb("idle", 0)


@dataclass(slots=True, kw_only=True)
class EngineCounters(WorkerCounters):
    """The worker's counters as its engines write them, one engine after the other. Fields about
    requests stay at 0 here: the main thread adds them to a beat."""

    phase: WorkPhase = "idle"
    progress: int = 0
    steps: int = 0
    """Decode steps."""
    chunk_lengths: set[int] = field(default_factory=set)
    """The different lengths of chunks, of which ``prefill_lengths`` is the number."""
    forward: Breadcrumb = IDLE
    """The forward pass that is running, or ran last."""
