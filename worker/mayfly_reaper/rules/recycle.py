"""Recycle policy: decides when a healthy worker is replaced, and which worker goes next.

A worker may leak (handles, memory) without being at fault yet, and a successor that takes over in
good order costs nobody anything. So a worker that is due is replaced where its replacement is
cheap, an overdue worker in any case.

A pool (the workers of one model) replaces one worker at a time. Where there is room for 1.2 times
the worker's memory, the successor is loaded first (a *surge*), and the pool never has a worker
less. Without this room, the worker leaves first: when it is idle or overdue, or when an operator
has asked for its replacement.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from mayfly_protocol.lifecycle import Beat
from mayfly_reaper.rules.events import RecycleCause, RecycleRequested
from mayfly_reaper.rules.incarnation import Incarnation
from mayfly_reaper.rules.slot import Slot
from mayfly_reaper.settings import Lifetime

JITTER = 0.1
OVERDUE = 2.0
OVERDUE_FOOTPRINT = 1.2
"""Multiple of the memory limit at which a worker is overdue to be replaced; memory runs out before
twice the limit is reached."""
SURGE_ROOM = 1.2


@dataclass(frozen=True, slots=True)
class DueRecycle:
    """The reason, for people, and the cause for which a healthy worker is due to be replaced. An
    ``overdue`` worker is replaced even while it is busy."""

    reason: str
    overdue: bool
    cause: RecycleCause


@dataclass(frozen=True, slots=True)
class PlannedRecycle:
    """A planned replacement of the healthy worker in a slot; with ``surge``, its successor is
    loaded before it leaves."""

    slot: str
    surge: bool
    reason: str
    cause: RecycleCause = "asked"

    def text(self, incarnation: int) -> str:
        """Returns one line for people; ``incarnation`` is the number of the worker that is
        replaced."""
        when = "first" if self.surge else "after it has left"
        return (
            f"worker {incarnation} of slot {self.slot} is replaced ({self.reason}): "
            f"its successor is loaded {when}"
        )

    def request(self) -> RecycleRequested:
        """Returns the event that makes the slot replace its worker."""
        return RecycleRequested(self.surge, self.reason, self.cause)


def recycle_due(worker: Incarnation, lifetime: Lifetime, now: float) -> DueRecycle | None:
    """Returns the reason for which a worker is due to be replaced; None if it is not due."""
    beat = worker.beat
    if beat is None:
        return None
    age_s = now - worker.spawned_at
    footprint = beat.memory.footprint
    jitter = _jitter(worker)
    measures: tuple[tuple[float, float, float, str, RecycleCause], ...] = (
        (beat.inferences, lifetime.max_inferences * jitter, OVERDUE, "inferences", "inferences"),
        (age_s, lifetime.max_age_s * jitter, OVERDUE, "seconds", "age"),
        (footprint, lifetime.max_footprint, OVERDUE_FOOTPRINT, "bytes of memory", "memory"),
    )
    found = [
        DueRecycle(f"recycle due: {value:.0f} {unit}", value >= factor * most, cause)
        for value, most, factor, unit, cause in measures
        if most and value >= most
    ]
    return max(found, key=lambda each: each.overdue, default=None)


def inference_budget(worker: Incarnation, lifetime: Lifetime) -> float:
    """Returns the number of finished answers after which this worker is due to be replaced; 0
    stands for no limit."""
    return lifetime.max_inferences * _jitter(worker)


def next_recycle(
    slots: Sequence[Slot],
    lifetime: Lifetime,
    requested: Collection[str],
    available: Callable[[], int],
    spacing_s: float,
    now: float,
) -> PlannedRecycle | None:
    """Returns the replacement of a healthy worker that a pool (the workers of one model) should
    begin now; None if there is none.

    Args:
        slots: the slots of one pool.
        requested: the names of slots whose worker an operator wants replaced: they go first.
        available: returns the memory that is available, in bytes.
        spacing_s: the least age of a worker that is replaced, in seconds.
    """
    if any(slot.recycling or slot.stopping for slot in slots):
        return None
    candidates: list[tuple[Slot, Incarnation, DueRecycle]] = []
    for slot in slots:
        worker = slot.current
        if worker is None or worker.state != "ready":
            continue
        not_before = max(slot.recycle_not_before, worker.spawned_at + spacing_s)
        if slot.name in requested:
            candidates.append((slot, worker, DueRecycle("somebody asked for it", True, "asked")))
        elif now >= not_before and (due := recycle_due(worker, lifetime, now)) is not None:
            candidates.append((slot, worker, due))
    candidates.sort(
        key=lambda each: (each[0].name not in requested, not each[2].overdue, each[1].spawned_at)
    )
    for slot, worker, due in candidates:
        surge = not slot.no_room_for_surge and has_room(worker.beat, available)
        if surge or due.overdue or idle(worker.beat):
            return PlannedRecycle(slot.name, surge, due.reason, due.cause)
    return None


def has_room(beat: Beat | None, available: Callable[[], int]) -> bool:
    """Returns True if a second worker fits into memory beside the worker that sent this
    heartbeat."""
    if beat is None or not beat.memory.footprint:
        return False  # nobody knows how much it takes
    memory = beat.memory
    on_device = SURGE_ROOM * (memory.active + memory.cache)
    if memory.device_free is not None and memory.device_free < on_device:
        return False
    return available() >= SURGE_ROOM * memory.footprint


def idle(beat: Beat | None) -> bool:
    return beat is not None and beat.phase == "idle" and not beat.running and not beat.waiting


def _jitter(worker: Incarnation) -> float:
    return 1 - JITTER + 2 * JITTER * worker.recycle_jitter
