"""Which worn worker of a pool is replaced next, and how.

One planned recycle a pool at a time. With a *surge* where there is room for 1.2 times the worker's
memory: the successor is loaded first, and the pool never has a worker less. Otherwise in its place:
when it is idle, when it is overdue, or when somebody asked for it.

When a worker that nothing is wrong with has served for long enough.

What leaks in it (handles, memory) is no fault until it is one; a successor that takes over in good
order costs nobody anything. A worn worker is replaced where that is cheap, an overdue one in any
case.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from mayfly_protocol.lifecycle import Beat
from mayfly_reaper.rules.events import RecycleAsked, RecycleCause
from mayfly_reaper.rules.incarnation import Incarnation
from mayfly_reaper.rules.slot import Slot
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


SURGE_ROOM = 1.2


@dataclass(frozen=True, slots=True)
class Renewal:
    slot: str
    surge: bool
    reason: str
    cause: RecycleCause = "asked"

    @property
    def text(self) -> str:
        """In one line, for people."""
        how = "its successor is loaded first" if self.surge else "in its place"
        return f"{self.slot}: the worker is replaced ({self.reason}), {how}"

    def asked(self) -> RecycleAsked:
        """For the slot."""
        return RecycleAsked(self.surge, self.reason, self.cause)


def next_renewal(
    slots: Sequence[Slot],
    lifetime: Lifetime,
    asked: Collection[str],
    room: Callable[[], int],
    spacing_s: float,
    now: float,
) -> Renewal | None:
    """The planned recycle that a pool should begin now, if there is one.

    Args:
        slots: of one pool.
        asked: the names of those that somebody wants recycled: they go first.
        room: measures the memory that is available, in bytes.
        spacing_s: since the worker was spawned, at least.
    """
    if any(slot.renewing or slot.stopping for slot in slots):
        return None
    candidates: list[tuple[Slot, Incarnation, Worn]] = []
    for slot in slots:
        life = slot.life
        if life is None or life.state != "ready":
            continue
        rested = max(slot.renew_at, life.spawned_at + spacing_s)
        if slot.name in asked:
            candidates.append((slot, life, Worn("somebody asked for it", True, "asked")))
        elif now >= rested and (wear := worn(life, lifetime, now)) is not None:
            candidates.append((slot, life, wear))
    candidates.sort(
        key=lambda each: (each[0].name not in asked, not each[2].overdue, each[1].spawned_at)
    )
    for slot, life, wear in candidates:
        surge = not slot.cramped and has_room(life.beat, room)
        if surge or wear.overdue or idle(life.beat):
            return Renewal(slot.name, surge, wear.reason, wear.cause)
    return None


def has_room(beat: Beat | None, room: Callable[[], int]) -> bool:
    """Whether a second worker like this one fits beside it."""
    if beat is None or not beat.memory.footprint:
        return False  # nobody knows how much it takes
    memory = beat.memory
    on_device = SURGE_ROOM * (memory.active + memory.cache)
    if memory.device_free is not None and memory.device_free < on_device:
        return False
    return room() >= SURGE_ROOM * memory.footprint


def idle(beat: Beat | None) -> bool:
    return beat is not None and beat.phase == "idle" and not beat.running and not beat.waiting
