"""Slots of a node (places for one worker process each) as the reaper manages them: with their
pools, their names, and their workers' memory."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from mayfly_reaper.machine import memory
from mayfly_reaper.rules.incarnation import STARTING
from mayfly_reaper.rules.slot import Slot
from mayfly_reaper.settings import Pool


@dataclass
class ManagedSlot:
    """A slot (a place for one worker process at a time) in its latest state, with the settings of
    its model's workers (``pool``). ``observed`` holds, by the number of the worker process, the
    fields that the observer was last shown."""

    slot: Slot
    pool: Pool
    observed: dict[int, tuple[object, ...]] = field(default_factory=dict)

    @property
    def incarnations(self) -> set[int]:
        """The numbers of the slot's worker processes."""
        return {worker.number for _, worker in self.slot.workers}


def slot_names(pools: Iterable[Pool]) -> Iterator[tuple[str, Pool]]:
    """Yields a name for each slot (place for one worker) of the pools, with its pool. A name is a
    model's short name and a number, fit for a ZeroMQ routing id and a file's name."""
    taken: Counter[str] = Counter()
    for pool in pools:
        short = re.sub(r"[^A-Za-z0-9._-]+", "-", pool.model_name.rstrip("/").rpartition("/")[2])
        short = short.strip(".-")[:40] or "model"
        for _ in range(pool.workers):
            yield f"{short}-{taken[short]}", pool
            taken[short] += 1


def memory_in_use(slots: Iterable[ManagedSlot]) -> int:
    """Returns the memory of all running workers by their last heartbeats, in bytes."""
    return sum(
        worker.beat.memory.footprint
        for managed in slots
        for _, worker in managed.slot.workers
        if worker.beat is not None
    )


def memory_promised(slots: Iterable[ManagedSlot]) -> int:
    """Returns the bytes of memory that workers that are still loading will take beyond their
    present memory."""
    return sum(
        max(0, managed.slot.memory_needed - worker.peak_footprint)
        for managed in slots
        for _, worker in managed.slot.workers
        if worker.state in STARTING
    )


def footprint_and_limit(slots: Iterable[ManagedSlot], incarnation: int) -> tuple[int, int]:
    """Returns the last reported memory of a worker process and its memory limit, in bytes; both are
    0 for an unknown process."""
    for managed in slots:
        for _, worker in managed.slot.workers:
            if worker.number == incarnation:
                configured = managed.pool.options.get("memory_limit")
                own = managed.slot.mitigations.memory_limit or configured
                limit = own if isinstance(own, int) and own else memory.total()
                footprint = worker.beat.memory.footprint if worker.beat is not None else 0
                return footprint, limit
    return 0, 0
