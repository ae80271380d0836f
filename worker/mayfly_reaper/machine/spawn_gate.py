"""Spawn gate: decides whether the machine can take one more worker process now.

The start of a worker is deferred for a pause after a fault of the machine (such as a GPU that
cannot be used), and until the memory of the slot's last worker is free again::

               enough memory is free again
    waiting -------------------------------------------------> a worker may start
       |                                                          ^
       +-- not within 30 s --> memory counts as lost -------------+  enough memory is free after
                               (the slot says so)                    all; or five minutes have
                                                                     passed and wired memory is
                                                                     not missing

A worker that starts before the last worker's memory is free again runs out of memory and dies.
Memory that a dead process had wired (pinned for the GPU) may stay lost until a reboot, and every
further worker would lose as much again: so no worker starts while wired memory is missing. Memory
that other programs have taken delays a start by five minutes at most.
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
"""Part of a worker's expected memory that must be free before the worker starts. It is less than 1,
since other programs take some memory, too."""


class SpawnGate:
    """Decides whether a worker may start now: not during the pause after a fault of the machine
    (such as an unusable GPU), and not without enough free memory.

    Args:
        measure: returns the machine's memory now.
        draw: returns a random number, uniform in [0, 1), for the jitter of pauses.
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
        """Defers the start of workers for a while after a fault of the machine (``reason``), for
        longer after each further fault in a row. Returns the time at which the pause ends."""
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
        """Returns the reason why the slot's next worker cannot start now, with the time of the next
        check; None if it can start.

        Args:
            slot: a slot without a worker that is due to get one.
            in_use: the memory of all running workers, in bytes.
            promised: the bytes that workers that are still loading will take beyond ``in_use``.
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
        """Returns the machine's memory, measured anew if the last measurement is half a second
        old."""
        if self._measured is None or now - self._measured[0] >= CHECK_AGAIN_S:
            self._measured = (now, self._measure())
        return self._measured[1]
