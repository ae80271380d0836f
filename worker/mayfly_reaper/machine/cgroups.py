"""Linux cgroups: the memory limits of this process and its child processes, and OOM kills.

Both versions of cgroups are understood. A limit holds for all cgroups below it, so the least limit
on the way up to the root counts. No function of this module raises: without a cgroup that can be
read, functions return None.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
ROOT = Path("/sys/fs/cgroup")
UNLIMITED = 1 << 60
"""Bytes from which on a limit counts as none: version 1 of cgroups says "no limit" with a number
close to 2^63."""


@dataclass(frozen=True, slots=True)
class Cgroup:
    """Folder of one cgroup in the file system of Linux's memory controller, in version 1 or 2 of
    cgroups, whose files have different names."""

    folder: Path
    version: int

    @property
    def limit(self) -> int | None:
        found = _number(self._file("memory.max", "memory.limit_in_bytes"))
        return found if found is not None and found < UNLIMITED else None

    @property
    def used(self) -> int | None:
        """Bytes in use in this cgroup, without the file cache, which the kernel gives up when
        memory is needed."""
        used = _number(self._file("memory.current", "memory.usage_in_bytes"))
        if used is None:
            return None
        stat = _read(self.folder / "memory.stat")
        prefix = "" if self.version == 2 else "total_"
        cached = (_field(stat, f"{prefix}{name}_file") or 0 for name in ("active", "inactive"))
        return max(0, used - sum(cached))

    @property
    def oom_kills(self) -> int | None:
        """Number of processes of this cgroup that the kernel has ever killed for want of memory."""
        return _field(_read(self._file("memory.events", "memory.oom_control")), "oom_kill")

    def _file(self, name: str, old_name: str) -> Path:
        return self.folder / (name if self.version == 2 else old_name)


def memory_limit() -> int | None:
    """Returns the least cgroup memory limit that holds for this process, in bytes; None without a
    limit."""
    return min((each.limit for each in _own_and_parents() if each.limit is not None), default=None)


def memory_available() -> int | None:
    """Returns the bytes that may still be used under the cgroup memory limits of this process; None
    without a limit."""
    left = []
    for each in _own_and_parents():
        limit, used = each.limit, each.used
        if limit is not None and used is not None:
            left.append(max(0, limit - used))
    return min(left, default=None)


def oom_kills() -> int | None:
    """Returns the number of processes that the kernel has killed for want of memory: in this
    process's own cgroup, or on the whole machine if the cgroup does not count them."""
    own = own_cgroup()
    counted = own.oom_kills if own is not None else None
    return counted if counted is not None else _field(_read(PROC / "vmstat"), "oom_kill")


def own_cgroup() -> Cgroup | None:
    """Returns the cgroup of this process; None if there is none that can be read."""
    for line in _read(PROC / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for version, root in ((1, ROOT / "memory"), (2, ROOT)):
            if controllers != ("memory" if version == 1 else ""):
                continue
            # A container sees its own cgroup as the root, whatever the path says.
            for folder in (root / path.lstrip("/"), root):
                found = Cgroup(folder, version)
                if found.used is not None:
                    return found
    return None


def _own_and_parents() -> Iterator[Cgroup]:
    own = own_cgroup()
    if own is None:
        return
    root = ROOT if own.version == 2 else ROOT / "memory"
    folder = own.folder
    while True:
        yield Cgroup(folder, own.version)
        if folder == root or root not in folder.parents:
            return
        folder = folder.parent


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdecimal() else None


def _field(text: str, name: str) -> int | None:
    found = re.search(rf"^{name} (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else None
