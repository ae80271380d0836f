"""Spawn gate: allows or defers the start of a worker, by what the slots of a machine share.

Spawns are deferred for a pause after a fault of the machine, and until the last worker's memory is
free again::

                     the last worker's memory is back
    waiting --------------------------------------------> free to spawn
       |                                                     ^
       +-- not within 30 s --> open: the slot says so -------+  it came back after all; or after
                                                                five minutes, if it was not wired

A worker that is started before the last one's memory is free again dies of that. Memory that a dead
process had wired may stay lost until a reboot, and every further worker would lose as much again:
so the breaker stays open while wired memory is missing. Memory that other programs took is no
reason to stay down for good.
"""

from __future__ import annotations

from collections.abc import Callable

from mayfly_reaper.machine.memory import MachineMemory
from mayfly_reaper.rules.backoff import backoff_s
from mayfly_reaper.rules.events import SpawnDeferred
from mayfly_reaper.rules.slot import Slot
from mayfly_reaper.settings import Budgets

CHECK_AGAIN_S = 0.5
OPEN_CHECK_AGAIN_S = 5.0
ENOUGH = 0.9
"""Share of the expected memory that must be free: other programs run here, too."""


class SpawnGate:
    """Memory of the machine before each spawn, and the pause after its last fault.

    Args:
        measure: returns the machine's memory now.
        draw: uniform in [0, 1), for the jitter.
    """

    def __init__(
        self, budgets: Budgets, measure: Callable[[], MachineMemory], draw: Callable[[], float]
    ) -> None:
        self._budgets = budgets
        self._measure = measure
        self._draw = draw
        self._wired_before = measure().wired or 0
        self._free_at_spawn: dict[str, int] = {}
        self._faults_in_a_row = 0
        self._faulted_at = float("-inf")
        self._paused_until = float("-inf")
        self._pause_reason = ""
        self._measured: tuple[float, MachineMemory] | None = None

    def pause_after_fault(self, reason: str, now: float) -> float:
        """Defers all spawns for a while after a fault of the machine. Returns until when."""
        budgets = self._budgets
        if now - self._faulted_at > budgets.retry_max_s:
            self._faults_in_a_row = 0
        self._faults_in_a_row += 1
        self._faulted_at = now
        self._paused_until = now + backoff_s(
            self._faults_in_a_row, budgets.retry_s, budgets.retry_max_s, self._draw()
        )
        self._pause_reason = reason
        return self._paused_until

    def deferral(
        self, slot: Slot, now: float, *, in_use: int, promised: int
    ) -> SpawnDeferred | None:
        """Returns what keeps a worker of a slot from being started now; None if nothing does.

        Args:
            slot: a slot that wants a worker.
            in_use: the memory of all workers that run, in bytes.
            promised: the memory beyond that which workers that are still loading will take.
        """
        if now < self._paused_until:
            reason = f"spawns are paused after a fault of the machine: {self._pause_reason}"
            return SpawnDeferred(self._paused_until, reason)
        memory = self.memory(now)
        free = max(0, memory.available - promised)
        expected = min(slot.memory_needed, self._free_at_spawn.get(slot.name, slot.memory_needed))
        if free >= ENOUGH * expected:
            self._free_at_spawn[slot.name] = free
            return None
        shortage = f"{free / 1e9:.1f} GB are free, {expected / 1e9:.1f} GB are needed"
        waited = now - slot.memory_freed_at
        if waited < self._budgets.memory_return_s:
            reason = f"waits for the last worker's memory: {shortage}"
            return SpawnDeferred(now + CHECK_AGAIN_S, reason, "memory")
        stranded = (memory.wired or 0) - self._wired_before - in_use
        is_wired = stranded >= (expected - free) / 2
        if waited >= self._budgets.retry_max_s and not is_wired:
            self._free_at_spawn[slot.name] = free
            return None
        return SpawnDeferred(
            now + OPEN_CHECK_AGAIN_S,
            f"the last worker's memory did not return: {shortage}; a reboot may be needed",
            "memory_lost",
        )

    def memory(self, now: float) -> MachineMemory:
        """Returns the machine's memory, measured at most every half second."""
        if self._measured is None or now - self._measured[0] >= CHECK_AGAIN_S:
            self._measured = (now, self._measure())
        return self._measured[1]
