"""Finds the processes of a ``mayfly serve`` and measures their memory and CPU time."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass

import psutil

MIB = 1 << 20
ROLES = {"front end": "mayfly_server.front", "worker": "mayfly_worker"}
"""Names of process roles, with the Python module that each runs as a child of ``mayfly serve``."""


def roles(reaper_pid: int) -> dict[str, list[psutil.Process]]:
    """The running processes of a ``mayfly serve`` by role: "reaper" (the main process, which
    supervises the others), "front end" and "worker". A role without a process has an empty list."""
    reaper = psutil.Process(reaper_pid)
    found: dict[str, list[psutil.Process]] = {"reaper": [reaper], **{role: [] for role in ROLES}}
    for child in reaper.children():
        try:
            command = child.cmdline()
        except psutil.NoSuchProcess:
            continue
        for role, module in ROLES.items():
            if module in command:
                found[role].append(child)
    return found


@dataclass(frozen=True)
class Memory:
    """A process's memory in MiB. ``uss`` would be freed if the process ended; ``rss`` also counts
    memory shared with other processes."""

    uss: float
    rss: float


def memory(process: psutil.Process) -> Memory:
    full = process.memory_full_info()
    return Memory(full.uss / MIB, full.rss / MIB)


def cpu_s(process: psutil.Process) -> float:
    """CPU seconds that the process has used so far; the system counts in hundredths of a second."""
    times = process.cpu_times()
    return float(times.user + times.system)


def wake_ups(process: psutil.Process) -> int:
    """Number of voluntary context switches of the process so far: times that its main thread slept
    until something happened."""
    switches: int = process.num_ctx_switches().voluntary
    return switches


@dataclass(frozen=True)
class Spent:
    """One process's use of CPU in an interval: cores (CPU seconds per second) and wake-ups per
    second."""

    cores: float
    wake_ups: float


class Meter:
    """Measures the CPU time and wake-ups of processes from the meter's making on."""

    def __init__(self, processes: list[psutil.Process]) -> None:
        self._began = time.monotonic()
        self._before = [(each, cpu_s(each), wake_ups(each)) for each in processes]

    def read(self) -> list[Spent]:
        took_s = time.monotonic() - self._began
        return [
            Spent((cpu_s(each) - cpu) / took_s, (wake_ups(each) - switches) / took_s)
            for each, cpu, switches in self._before
        ]


def as_many_files_as_allowed() -> int:
    """Raises this process's limit of open files to the hard limit, for its children too; returns
    the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
