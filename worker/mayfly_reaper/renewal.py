"""Which worn worker of a pool is replaced next, and how.

One planned recycle a pool at a time. With a *surge* where there is room for 1.2 times the worker's
memory: the successor is loaded first, and the pool never has a worker less. Otherwise in its place:
when it is idle, when it is overdue, or when somebody asked for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from mayfly_protocol.lifecycle import Beat
from mayfly_reaper.events import RecycleAsked, RecycleCause
from mayfly_reaper.incarnation import Incarnation
from mayfly_reaper.settings import Lifetime
from mayfly_reaper.slot import Slot
from mayfly_reaper.wear import Worn, worn

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
