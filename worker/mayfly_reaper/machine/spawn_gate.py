"""What the slots of one machine share: a pause after a fault of the machine, and its memory.

::

                     the last worker's memory is back
    waiting --------------------------------------------> free to spawn
       |                                                     ^
       +-- not within 30 s --> open: the slot says so -------+  it came back after all; or after
                                                                five minutes, if it was not wired

A worker that is started before the last one's memory is free again dies of that. Memory that a dead
process had wired may stay lost until a reboot, and every further worker would lose as much again:
so the breaker stays open while wired memory is what is missing. What other programs took is no
reason to stay dark for good.
"""

from __future__ import annotations

from collections.abc import Callable

from mayfly_reaper.machine.memory import MachineMemory
from mayfly_reaper.rules.backoff import backoff_s
from mayfly_reaper.rules.events import SpawnDeferred
from mayfly_reaper.rules.slot import Slot
from mayfly_reaper.settings import Budgets

LOOK_AGAIN_S = 0.5
OPEN_LOOK_AGAIN_S = 5.0
ENOUGH = 0.9
"""Of what is expected: other programs live here, too."""


class SpawnGate:
    """Remembers what the machine had before each spawn.

    Args:
        measure: the machine's room now.
        draw: uniform in [0, 1), for the jitter.
    """

    def __init__(
        self, budgets: Budgets, measure: Callable[[], MachineMemory], draw: Callable[[], float]
    ) -> None:
        self._budgets = budgets
        self._measure = measure
        self._draw = draw
        self._wired_before = measure().wired or 0
        self._had: dict[str, int] = {}
        self._strikes = 0
        self._struck_at = float("-inf")
        self._until = float("-inf")
        self._why = ""
        self._measured: tuple[float, MachineMemory] | None = None

    def strike(self, why: str, now: float) -> float:
        """A fault of the machine: nothing is started for a while. Returns until when."""
        if now - self._struck_at > self._budgets.retry_max_s:
            self._strikes = 0
        self._strikes += 1
        self._struck_at = now
        budgets = self._budgets
        self._until = now + backoff_s(
            self._strikes, budgets.retry_s, budgets.retry_max_s, self._draw()
        )
        self._why = why
        return self._until

    def hold(self, slot: Slot, now: float, *, living: int, promised: int) -> SpawnDeferred | None:
        """What keeps a worker of a slot from being started now; None if nothing does.

        Args:
            slot: one that wants a worker.
            living: the memory of all workers that run, in bytes.
            promised: what those among them that are still loading will take beyond that.
        """
        if now < self._until:
            return SpawnDeferred(self._until, f"the machine is given a pause: {self._why}")
        room = self.room(now)
        free = max(0, room.available - promised)
        expected = min(slot.memory_needed, self._had.get(slot.name, slot.memory_needed))
        if free >= ENOUGH * expected:
            self._had[slot.name] = free
            return None
        lacks = f"{free / 1e9:.1f} GB are free, {expected / 1e9:.1f} GB are needed"
        waited = now - slot.memory_freed_at
        if waited < self._budgets.memory_return_s:
            return SpawnDeferred(
                now + LOOK_AGAIN_S, f"waits for the last worker's memory: {lacks}", "memory"
            )
        stranded = (room.wired or 0) - self._wired_before - living
        is_wired = stranded >= (expected - free) / 2
        if waited >= self._budgets.retry_max_s and not is_wired:
            self._had[slot.name] = free
            return None
        return SpawnDeferred(
            now + OPEN_LOOK_AGAIN_S,
            f"the last worker's memory did not return: {lacks}; a reboot may be needed",
            "memory_lost",
        )

    def room(self, now: float) -> MachineMemory:
        """Measured at most every half second."""
        if self._measured is None or now - self._measured[0] >= LOOK_AGAIN_S:
            self._measured = (now, self._measure())
        return self._measured[1]
