"""Recycler: begins the replacement of healthy workers, when it is due or when an operator asks.

The rules of :mod:`mayfly_reaper.rules.recycle` choose the worker. A pool (the workers of one model)
replaces one worker at a time, so the recycler keeps the operator's requests until their turn comes.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from mayfly_protocol.roster import Done
from mayfly_reaper.managed_slots import ManagedSlot
from mayfly_reaper.observer import About, SafeObserver
from mayfly_reaper.rules.events import Event, RecycleRequested
from mayfly_reaper.rules.recycle import next_recycle


class Recycler:
    """Planned replacements (recycles) of a node's healthy workers, one at a time in each pool (the
    workers of one model).

    Args:
        slots: all slots of the node, by name.
        apply: passes an event to the rules of a slot.
        available: returns the memory that is available, in bytes.
        spacing_s: the least age of a worker that is replaced, in seconds.
    """

    def __init__(
        self,
        slots: Mapping[str, ManagedSlot],
        apply: Callable[[str, Event], None],
        available: Callable[[], int],
        spacing_s: float,
        observer: SafeObserver,
    ) -> None:
        self._slots = slots
        self._apply = apply
        self._available = available
        self._spacing_s = spacing_s
        self._observer = observer
        self._requested: dict[str, int] = {}
        """Slots whose worker an operator wants replaced, each with the number of the worker process
        meant."""

    def request(self, names: Sequence[str]) -> Done:
        """Takes an operator's request to replace the workers of some slots: a worker that serves is
        replaced when its turn comes, and a slot without a worker gets one at once."""
        unknown = [name for name in names if name not in self._slots]
        if unknown:
            known = ", ".join(self._slots)
            return Done(False, f"there is no slot {unknown[0]!r} here, but {known}")
        starting = []
        for name in names:
            slot = self._slots[name].slot
            if slot.state == "ready":
                self._requested[name] = slot.incarnation
            elif slot.current is None:
                self._apply(name, RecycleRequested())
            else:
                starting.append(name)
        if starting:
            return Done(True, f"{', '.join(starting)}: a new worker is on its way already")
        return Done(True, f"recycling {', '.join(names)}")

    def begin_due(self) -> None:
        """Begins the replacements of workers (recycles) that are due, one in each pool."""
        now = time.monotonic()
        pools: dict[int, list[ManagedSlot]] = defaultdict(list)
        for managed in self._slots.values():
            pools[id(managed.pool)].append(managed)
        requested = {
            name
            for name, number in self._requested.items()
            if self._slots[name].slot.incarnation == number
        }
        for pool in pools.values():
            planned = next_recycle(
                [managed.slot for managed in pool],
                pool[0].pool.lifetime,
                requested,
                self._available,
                self._spacing_s,
                now,
            )
            if planned is not None:
                self._requested.pop(planned.slot, None)
                number = self._slots[planned.slot].slot.incarnation
                self._observer.note(planned.text(number), About(planned.slot, number))
                self._apply(planned.slot, planned.request())
