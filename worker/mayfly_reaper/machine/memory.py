"""Memory of the machine: available, wired and total, in bytes.

The memory of a dead process is not always free at once. On macOS it may stay lost: after SIGKILL of
a process with much wired memory, that memory was not free again until the next reboot.

=======  ===========================================================================
Linux    the kernel's available memory, or less where a cgroup sets a limit
macOS    the pages of ``vm_stat`` that are free or can be had at once; wired pages apart
=======  ===========================================================================

The macOS half has been tested with recorded output only.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass

import psutil

from mayfly_reaper.machine import cgroups

VM_STAT = ("vm_stat",)
VM_STAT_S = 2.0

_PAGE_SIZE = re.compile(r"page size of (\d+) bytes")
_PAGES = re.compile(r'^"?([^":]+)"?:\s+(\d+)\.?$', re.MULTILINE)
_AVAILABLE = ("Pages free", "Pages inactive", "Pages speculative", "Pages purgeable")


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """Memory of the machine in bytes; ``wired`` (memory that cannot be swapped out) is None where
    the system does not report it."""

    available: int
    wired: int | None = None


def measure() -> MachineMemory:
    """Measures the machine's memory now. If macOS's ``vm_stat`` fails, psutil is used instead."""
    if sys.platform == "darwin":
        try:
            ran = subprocess.run(
                VM_STAT, capture_output=True, text=True, timeout=VM_STAT_S, check=True
            )
            return parse_vm_stat(ran.stdout)
        except (OSError, subprocess.SubprocessError, ValueError):
            return MachineMemory(psutil.virtual_memory().available)
    available = psutil.virtual_memory().available
    limited = cgroups.memory_available()
    return MachineMemory(available if limited is None else min(available, limited))


def total() -> int:
    """Returns the bytes of memory that all processes together may ever use, on this machine or,
    where a cgroup sets a limit, within the limit."""
    limit = cgroups.memory_limit() if sys.platform == "linux" else None
    machine: int = psutil.virtual_memory().total
    return machine if limit is None else min(machine, limit)


def parse_vm_stat(text: str) -> MachineMemory:
    """Parses the output of macOS's ``vm_stat``. Raises ValueError if the text is something else."""
    size = _PAGE_SIZE.search(text)
    pages = {name: int(count) for name, count in _PAGES.findall(text)}
    if size is None or "Pages free" not in pages or "Pages wired down" not in pages:
        raise ValueError("this is not vm_stat's output")
    page_bytes = int(size[1])
    available = sum(pages.get(name, 0) for name in _AVAILABLE)
    return MachineMemory(available * page_bytes, pages["Pages wired down"] * page_bytes)
