"""The workers' processes, by the number of their incarnation.

The workers that a reaper leaves behind when it is killed, and that its successor waits for.

They finish what they run within their own bound and leave by themselves. Until then their memory
is not free, so the slots that they were in stay empty; those that overstay are killed. Each worker
is written down with its pid and with what it was told on its command line, which names the
incarnation's number and is no other process's. A pid alone may be a stranger's by now.
"""

from __future__ import annotations

import json
import logging
import math
import signal
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from mayfly_protocol import breadcrumb
from mayfly_protocol.breadcrumb import Breadcrumb
from mayfly_protocol.common.throttle import LogThrottle
from mayfly_reaper.machine.oom import OomWatch
from mayfly_reaper.paths import rewrite
from mayfly_reaper.processes.spawn import Spawner, WorkerProcess
from mayfly_reaper.rules.events import Exited, NotStarted, Started
from mayfly_reaper.rules.mitigations import Mitigations
from mayfly_reaper.settings import Pool

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Entry:
    slot: str
    incarnation: int
    pid: int
    told: str


class WorkersFile:
    """The workers that live, in a file. One that can't be written costs the next reaper the
    knowledge of them, and this one nothing: ``note`` is told once."""

    def __init__(self, path: Path, note: Callable[[str], None]) -> None:
        self._path = path
        self._complain = LogThrottle(note, quiet_s=math.inf)
        self._entries = {entry.incarnation: entry for entry in self._read()}

    @property
    def entries(self) -> list[Entry]:
        """At first those that the reaper before this one wrote down last."""
        return list(self._entries.values())

    def add(self, entry: Entry) -> None:
        self._entries[entry.incarnation] = entry
        self._write()

    def remove(self, incarnation: int) -> None:
        if self._entries.pop(incarnation, None) is not None:
            self._write()

    def _read(self) -> list[Entry]:
        try:
            return [
                Entry(each["slot"], each["incarnation"], each["pid"], each["told"])
                for each in json.loads(self._path.read_text())
            ]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, KeyError) as error:
            _log.warning("cannot read %s: %s", self._path, error)
            return []

    def _write(self) -> None:
        text = json.dumps([asdict(entry) for entry in self.entries])
        try:
            rewrite(self._path, text)
        except OSError as error:
            self._complain(f"the list of workers cannot be written: {error}")


class Orphans:
    """Those in a ledger that its reaper has not started itself, for as long as they live.
    ``overdue_at`` is when they are killed, on the clock of whoever asks."""

    def __init__(self, ledger: WorkersFile, overdue_at: float) -> None:
        self._ledger = ledger
        self._overdue_at = overdue_at
        self._left = {entry: _same(entry) for entry in ledger.entries}

    def look(self, now: float) -> list[Entry]:
        """Those that still live. Overdue ones are killed."""
        for entry, process in list(self._left.items()):
            if process is None or not _runs(process):
                del self._left[entry]
                self._ledger.remove(entry.incarnation)
            elif now >= self._overdue_at:
                try:
                    process.kill()  # psutil's: not if the pid has become another's
                except psutil.Error as error:
                    _log.warning("cannot kill the orphan %d: %s", entry.pid, error)
        return list(self._left)


def _same(entry: Entry) -> psutil.Process | None:
    """The process of an entry, if it is still that."""
    try:
        process = psutil.Process(entry.pid)
        return process if entry.told in process.cmdline() else None
    except psutil.Error:
        return None


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


class Children:
    """Starts them, ends them, and notices their ends."""

    def __init__(self, spawner: Spawner, ledger: WorkersFile, pressure: OomWatch) -> None:
        self._spawner = spawner
        self._ledger = ledger
        self._pressure = pressure
        self._processes: dict[int, tuple[str, WorkerProcess]] = {}

    def spawn(
        self, slot: str, pool: Pool, incarnation: int, mitigations: Mitigations
    ) -> Started | NotStarted:
        try:
            process = self._spawner.spawn(slot, pool, incarnation, mitigations)
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
        self._pressure.poll()
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
            oom_evidence = ""
            if status == -signal.SIGKILL:
                oom_evidence = self._pressure.evidence(process.pid, *footprint(incarnation))
            stderr = process.stderr.tail()
            crumb = breadcrumb.read(process.crumb)
            process.clear()
            self._ledger.remove(incarnation)
            yield slot, Exited(incarnation, status, stderr, crumb, oom_evidence)

    def kill_all(self) -> None:
        """Ends them here and now, and waits until they are gone."""
        for incarnation, (_, process) in self._processes.items():
            process.kill()
            process.clear()
            self._ledger.remove(incarnation)
        self._processes.clear()
