"""What the engine does, in numbers, for the beats."""

from __future__ import annotations

from dataclasses import dataclass, field

from mayfly_protocol.breadcrumb import Breadcrumb
from mayfly_protocol.common.histogram import STEP_BOUNDS_S, Tally
from mayfly_protocol.lifecycle import WorkPhase

IDLE = Breadcrumb("idle", 0)


def _step_tally() -> Tally:
    return Tally(STEP_BOUNDS_S)


@dataclass(slots=True)
class Gauges:
    """What other threads may read at any time; each field is written by the engine alone."""

    phase: WorkPhase = "idle"
    progress: int = 0
    running: int = 0
    waiting: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    steps: int = 0
    rows: int = 0
    kv_bytes: int = 0
    decode_s: Tally = field(default_factory=_step_tally)
    prefill_s: Tally = field(default_factory=_step_tally)
    prefill_lengths: set[int] = field(default_factory=set)
    active_bytes: int = 0
    cache_bytes: int = 0
    peak_bytes: int = 0
    prefix_bytes: int = 0
    device_free: int | None = None
    forward: Breadcrumb = IDLE
    """The forward pass that is running, or ran last."""
