"""The slots of a node, each with what belongs to it outside the rules."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from mayfly_reaper import memory
from mayfly_reaper.incarnation import STARTING
from mayfly_reaper.settings import Pool
from mayfly_reaper.slot import Slot


@dataclass
class Seat:
    """``told`` is what the observer last heard of each of its incarnations."""

    slot: Slot
    pool: Pool
    told: dict[int, tuple[object, ...]] = field(default_factory=dict)


def named(pools: Iterable[Pool]) -> Iterator[tuple[str, Pool]]:
    """Names the slots after their models: short, and fit for a routing id and a file's name."""
    taken: Counter[str] = Counter()
    for pool in pools:
        short = re.sub(r"[^A-Za-z0-9._-]+", "-", pool.model_name.rstrip("/").rpartition("/")[2])
        short = short.strip(".-")[:40] or "model"
        for _ in range(pool.workers):
            yield f"{short}-{taken[short]}", pool
            taken[short] += 1


def numbers(seat: Seat) -> set[int]:
    """Those of a slot's workers."""
    return {life.number for _, life in seat.slot.lives}


def living(seats: Iterable[Seat]) -> int:
    """The memory of all workers that run, in bytes."""
    return sum(
        life.beat.memory.footprint
        for seat in seats
        for _, life in seat.slot.lives
        if life.beat is not None
    )


def promised(seats: Iterable[Seat]) -> int:
    """What those that are still loading will take beyond what they have, in bytes."""
    return sum(
        max(0, seat.slot.needs - life.footprint)
        for seat in seats
        for _, life in seat.slot.lives
        if life.state in STARTING
    )


def footprint(seats: Iterable[Seat], incarnation: int) -> tuple[int, int]:
    """The last known memory of a worker, and what it may have, in bytes."""
    for seat in seats:
        for _, life in seat.slot.lives:
            if life.number == incarnation:
                own = seat.slot.precautions.memory_limit or seat.pool.options.get("memory_limit")
                limit = own if isinstance(own, int) and own else memory.total()
                return (life.beat.memory.footprint if life.beat is not None else 0), limit
    return 0, 0
