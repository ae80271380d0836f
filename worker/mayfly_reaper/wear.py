"""When a worker that nothing is wrong with has served for long enough.

What leaks in it (handles, memory) is no fault until it is one; a successor that takes over in good
order costs nobody anything. A worn worker is replaced where that is cheap, an overdue one in any
case.
"""

from __future__ import annotations

from dataclasses import dataclass

from mayfly_reaper.events import RecycleCause
from mayfly_reaper.incarnation import Incarnation
from mayfly_reaper.settings import Lifetime

JITTER = 0.1
OVERDUE = 2.0
OVERDUE_FOOTPRINT = 1.2
"""Memory ends before twice of what is much."""


@dataclass(frozen=True, slots=True)
class Worn:
    """``reason`` is for people."""

    reason: str
    overdue: bool
    cause: RecycleCause


def worn(life: Incarnation, lifetime: Lifetime, now: float) -> Worn | None:
    """Whether, and of what, a worker is worn."""
    beat = life.beat
    if beat is None:
        return None
    age_s = now - life.spawned_at
    footprint = beat.memory.footprint
    jitter = _jitter(life)
    measures: tuple[tuple[float, float, float, str, RecycleCause], ...] = (
        (beat.inferences, lifetime.max_inferences * jitter, OVERDUE, "inferences", "inferences"),
        (age_s, lifetime.max_age_s * jitter, OVERDUE, "seconds", "age"),
        (footprint, lifetime.max_footprint, OVERDUE_FOOTPRINT, "bytes of memory", "memory"),
    )
    found = [
        Worn(f"worn: {value:.0f} {what}", value >= factor * most, cause)
        for value, most, factor, what, cause in measures
        if most and value >= most
    ]
    return max(found, key=lambda each: each.overdue, default=None)


def inference_budget(life: Incarnation, lifetime: Lifetime) -> float:
    """After how many finished choices this worker is worn; 0: never."""
    return lifetime.max_inferences * _jitter(life)


def _jitter(life: Incarnation) -> float:
    return 1 - JITTER + 2 * JITTER * life.share
