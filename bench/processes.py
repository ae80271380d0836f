"""What the processes of a server cost: which is which, their memory, and their time on a core."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass

import psutil

MIB = 1 << 20
ROLES = {"front end": "mayfly_server.front", "worker": "mayfly_worker"}
"""By the module that a child of the reaper runs."""


def roles(reaper_pid: int) -> dict[str, list[psutil.Process]]:
    """The processes of a ``mayfly serve`` that live. A name with no process has an empty list."""
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
    """MiB. ``uss`` is what would be free again without the process, ``rss`` also counts what it
    shares with others."""

    uss: float
    rss: float


def memory(process: psutil.Process) -> Memory:
    full = process.memory_full_info()
    return Memory(full.uss / MIB, full.rss / MIB)


def cpu_s(process: psutil.Process) -> float:
    """Seconds on a core so far. The system counts them in hundredths."""
    times = process.cpu_times()
    return float(times.user + times.system)


def wake_ups(process: psutil.Process) -> int:
    """How often its threads have waited for something so far."""
    switches: int = process.num_ctx_switches().voluntary
    return switches


@dataclass(frozen=True)
class Spent:
    """Of one process in an interval: cores, and wake-ups a second."""

    cores: float
    wake_ups: float


class Meter:
    """What processes spend from now on."""

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
    """Raises this process's limit of open files, which its children inherit; returns it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
