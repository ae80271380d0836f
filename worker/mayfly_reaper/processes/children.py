"""Worker processes of this reaper, by their numbers, and orphans of an earlier reaper.

Orphans are workers that a killed reaper has left behind. They finish their requests within their
own time limit and exit by themselves. Until they are gone their memory is not free, so the slots
that they were in stay empty; orphans that stay too long are killed.

Each worker is listed in a file with its pid and with its settings as they stand on its command
line. The settings contain the number of the worker process, so no other process has the same
settings; a pid alone may be another process's by now.
"""

from __future__ import annotations

import json
import logging
import math
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from mayfly_protocol import breadcrumb
from mayfly_protocol.breadcrumb import Breadcrumb
from mayfly_protocol.common.throttle import LogThrottle
from mayfly_reaper.machine.oom import OomWatch
from mayfly_reaper.paths import rewrite
from mayfly_reaper.processes.spawn import Spawner, WorkerProcess
from mayfly_reaper.rules.events import ProcessExited, ProcessStarted, SpawnFailed
from mayfly_reaper.rules.mitigations import Mitigations
from mayfly_reaper.settings import Pool

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerEntry:
    """One worker in the file that lists the running workers."""

    slot: str
    incarnation: int
    pid: int
    settings_json: str


class WorkersFile:
    """File that lists the running workers. If it cannot be written, this reaper goes on and
    ``note`` is called once, but the next reaper does not learn of workers that this reaper leaves
    behind."""

    def __init__(self, path: Path, note: Callable[[str], None]) -> None:
        self._path = path
        self._note_once = LogThrottle(note, quiet_s=math.inf)
        self._entries = {entry.incarnation: entry for entry in self._read()}

    @property
    def entries(self) -> list[WorkerEntry]:
        """The workers in the file; at first the workers of the reaper before this reaper."""
        return list(self._entries.values())

    def add(self, entry: WorkerEntry) -> None:
        self._entries[entry.incarnation] = entry
        self._write()

    def remove(self, incarnation: int) -> None:
        if self._entries.pop(incarnation, None) is not None:
            self._write()

    def _read(self) -> list[WorkerEntry]:
        try:
            return [
                WorkerEntry(each["slot"], each["incarnation"], each["pid"], each["told"])
                for each in json.loads(self._path.read_text())
            ]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, KeyError) as error:
            _log.warning(
                "cannot read %s, so workers that an earlier reaper left behind are not known: %s",
                self._path,
                error,
            )
            return []

    def _write(self) -> None:
        listed = [
            {
                "slot": entry.slot,
                "incarnation": entry.incarnation,
                "pid": entry.pid,
                "told": entry.settings_json,
            }
            for entry in self.entries
        ]
        try:
            rewrite(self._path, json.dumps(listed))
        except OSError as error:
            self._note_once(
                f"the list of workers cannot be written, so the next reaper lacks it: {error}"
            )


class Orphans:
    """Workers that an earlier reaper left behind, for as long as they run. ``overdue_at`` is the
    time at which they are killed, by the clock of :meth:`poll`."""

    def __init__(self, workers_file: WorkersFile, overdue_at: float) -> None:
        self._workers_file = workers_file
        self._overdue_at = overdue_at
        self._left = {entry: _process_of(entry) for entry in workers_file.entries}

    def poll(self, now: float) -> list[WorkerEntry]:
        """Returns the workers of an earlier reaper that still run, after killing them if the
        time that they had to end by themselves is over."""
        for entry, process in list(self._left.items()):
            if process is None or not _runs(process):
                del self._left[entry]
                self._workers_file.remove(entry.incarnation)
            elif now >= self._overdue_at:
                try:
                    process.kill()  # psutil's: not if the pid has become another's
                except psutil.Error as error:
                    _log.warning(
                        "cannot kill the worker of an earlier reaper with pid %d, "
                        "so its slot stays empty: %s",
                        entry.pid,
                        error,
                    )
        return list(self._left)


def _process_of(entry: WorkerEntry) -> psutil.Process | None:
    """Returns the process of a listed worker; None if the pid is no longer the worker's."""
    try:
        process = psutil.Process(entry.pid)
        return process if entry.settings_json in process.cmdline() else None
    except psutil.Error:
        return None


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


class Children:
    """Worker processes of this reaper: starts and ends them, and notices when they have ended."""

    def __init__(self, spawner: Spawner, workers_file: WorkersFile, oom_watch: OomWatch) -> None:
        self._spawner = spawner
        self._workers_file = workers_file
        self._oom_watch = oom_watch
        self._processes: dict[int, tuple[str, WorkerProcess]] = {}

    def spawn(
        self, slot: str, pool: Pool, incarnation: int, mitigations: Mitigations
    ) -> ProcessStarted | SpawnFailed:
        try:
            process = self._spawner.spawn(slot, pool, incarnation, mitigations)
        except OSError as error:
            return SpawnFailed(incarnation, str(error))
        self._processes[incarnation] = (slot, process)
        self._workers_file.add(WorkerEntry(slot, incarnation, process.pid, process.settings_json))
        return ProcessStarted(incarnation, process.pid)

    def signal(self, incarnation: int, number: int) -> None:
        if incarnation in self._processes:
            self._processes[incarnation][1].signal(number)

    def breadcrumb(self, incarnation: int) -> Breadcrumb | None:
        """Returns the record of a worker's last forward pass, which outlives the worker; None if
        there is none."""
        if incarnation not in self._processes:
            return None
        return breadcrumb.read(self._processes[incarnation][1].crumb)

    def wipe_kernels(self, slot: str) -> None:
        self._spawner.wipe_kernels(slot)

    def housekeep(self) -> None:
        """Cuts down stderr files of workers that have grown too large, and reads the kernel's count
        of OOM kills. To be called every second or so."""
        self._oom_watch.poll()
        for _, process in self._processes.values():
            process.stderr.trim()

    def ended(self) -> list[tuple[str, int]]:
        """Returns the slot and number of each worker whose process has ended and that :meth:`exits`
        has not yielded yet."""
        return [
            (slot, incarnation)
            for incarnation, (slot, process) in self._processes.items()
            if process.poll() is not None
        ]

    def exits(
        self, footprint: Callable[[int], tuple[int, int]]
    ) -> Iterator[tuple[str, ProcessExited]]:
        """Yields the slot and the exit of each worker whose process has ended, and forgets the
        worker.

        Args:
            footprint: returns a worker's last reported memory and its memory limit, in bytes, by
                the worker's number.
        """
        for incarnation, (slot, process) in list(self._processes.items()):
            status = process.poll()
            if status is None:
                continue
            del self._processes[incarnation]
            oom_evidence = ""
            if status == -signal.SIGKILL:
                oom_evidence = self._oom_watch.evidence(process.pid, *footprint(incarnation))
            stderr = process.stderr.tail()
            crumb = breadcrumb.read(process.crumb)
            process.clear()
            self._workers_file.remove(incarnation)
            yield slot, ProcessExited(incarnation, status, stderr, crumb, oom_evidence)

    def kill_all(self) -> None:
        """Kills all workers and waits until their processes are gone."""
        for incarnation, (_, process) in self._processes.items():
            process.kill()
            process.clear()
            self._workers_file.remove(incarnation)
        self._processes.clear()
