"""The workers' processes, by the number of their incarnation."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

from mayfly_protocol import breadcrumb
from mayfly_protocol.breadcrumb import Breadcrumb
from mayfly_reaper.events import Exited, NotStarted, Started
from mayfly_reaper.orphans import Entry, Ledger
from mayfly_reaper.precautions import Precautions
from mayfly_reaper.pressure import Pressure
from mayfly_reaper.settings import Pool
from mayfly_reaper.spawn import Spawner, WorkerProcess


class Children:
    """Starts them, ends them, and notices their ends."""

    def __init__(self, spawner: Spawner, ledger: Ledger, pressure: Pressure) -> None:
        self._spawner = spawner
        self._ledger = ledger
        self._pressure = pressure
        self._processes: dict[int, tuple[str, WorkerProcess]] = {}

    def spawn(
        self, slot: str, pool: Pool, incarnation: int, precautions: Precautions
    ) -> Started | NotStarted:
        try:
            process = self._spawner.spawn(slot, pool, incarnation, precautions)
        except OSError as error:
            return NotStarted(incarnation, str(error))
        self._processes[incarnation] = (slot, process)
        self._ledger.add(Entry(slot, incarnation, process.pid, process.told))
        return Started(incarnation, process.pid)

    def signal(self, incarnation: int, number: int) -> None:
        if incarnation in self._processes:
            self._processes[incarnation][1].signal(number)

    def crumb(self, incarnation: int) -> Breadcrumb | None:
        """What its forward pass is about, or was; None where that is not known."""
        if incarnation not in self._processes:
            return None
        return breadcrumb.read(self._processes[incarnation][1].crumb)

    def wipe_kernels(self, slot: str) -> None:
        self._spawner.wipe_kernels(slot)

    def attend(self) -> None:
        """To be called every second or so. Keeps what they write to stderr from filling the disk,
        and an eye on the machine's memory."""
        self._pressure.look()
        for _, process in self._processes.values():
            process.stderr.trim()

    def ended(self) -> list[tuple[str, int]]:
        """Those that have ended since, by their slots' names; :meth:`exits` tells more of them."""
        return [
            (slot, incarnation)
            for incarnation, (slot, process) in self._processes.items()
            if process.poll() is not None
        ]

    def exits(self, footprint: Callable[[int], tuple[int, int]]) -> Iterator[tuple[str, Exited]]:
        """Those that have ended since, with their slots' names.

        Args:
            footprint: an incarnation's last known memory and what it may have, in bytes.
        """
        for incarnation, (slot, process) in list(self._processes.items()):
            status = process.poll()
            if status is None:
                continue
            del self._processes[incarnation]
            starved = ""
            if status == -signal.SIGKILL:
                starved = self._pressure.evidence(process.pid, *footprint(incarnation))
            stderr = process.stderr.tail()
            crumb = breadcrumb.read(process.crumb)
            process.clear()
            self._ledger.remove(incarnation)
            yield slot, Exited(incarnation, status, stderr, crumb, starved)

    def kill_all(self) -> None:
        """Ends them here and now, and waits until they are gone."""
        for incarnation, (_, process) in self._processes.items():
            process.kill()
            process.clear()
            self._ledger.remove(incarnation)
        self._processes.clear()
