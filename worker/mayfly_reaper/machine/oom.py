"""Whether the system may have killed a worker for its memory.

SIGKILL leaves no words. What is looked at, and none of it is proof:

* the kernel's count of OOM kills has just grown (Linux);
* a report of jetsam's names the process (macOS; tested with a report made by hand only);
* the process's last footprint was close to what it may have.

What Linux's cgroups say of the memory of this process and of those that it starts.

Both versions are understood; where a limit is set, it holds for everything below it, so the least
of those on the way up to the root counts. Nothing here raises: where there is no cgroup, or none
that may be read, the answer is None.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
ROOT = Path("/sys/fs/cgroup")
UNLIMITED = 1 << 60
"""Version 1 says "no limit" with a number close to 2^63."""


@dataclass(frozen=True, slots=True)
class Cgroup:
    """A folder of the memory controller's, and its files' names."""

    folder: Path
    version: int

    @property
    def limit(self) -> int | None:
        found = _number(self._file("memory.max", "memory.limit_in_bytes"))
        return found if found is not None and found < UNLIMITED else None

    @property
    def used(self) -> int | None:
        """Without what the kernel only keeps of files, and gives up when somebody needs room."""
        used = _number(self._file("memory.current", "memory.usage_in_bytes"))
        if used is None:
            return None
        stat = _read(self.folder / "memory.stat")
        prefix = "" if self.version == 2 else "total_"
        cached = (_field(stat, f"{prefix}{name}_file") or 0 for name in ("active", "inactive"))
        return max(0, used - sum(cached))

    @property
    def oom_kills(self) -> int | None:
        """How many of its processes the kernel has killed for want of memory, ever."""
        return _field(_read(self._file("memory.events", "memory.oom_control")), "oom_kill")

    def _file(self, name: str, old_name: str) -> Path:
        return self.folder / (name if self.version == 2 else old_name)


def limit() -> int | None:
    """The least limit that holds for this process."""
    return min((each.limit for each in _upwards() if each.limit is not None), default=None)


def available() -> int | None:
    """What may still be used under the limits that hold for this process."""
    left = []
    for each in _upwards():
        limit, used = each.limit, each.used
        if limit is not None and used is not None:
            left.append(max(0, limit - used))
    return min(left, default=None)


def oom_kills() -> int | None:
    """How many processes the kernel has killed for want of memory: those of this process's own
    cgroup, or of the whole machine where that can't be told."""
    own = next(_upwards(), None)
    counted = own.oom_kills if own is not None else None
    return counted if counted is not None else _field(_read(PROC / "vmstat"), "oom_kill")


def _upwards() -> Iterator[Cgroup]:
    """This process's cgroup and those above it."""
    own = _own()
    if own is None:
        return
    root = ROOT if own.version == 2 else ROOT / "memory"
    folder = own.folder
    while True:
        yield Cgroup(folder, own.version)
        if folder == root or root not in folder.parents:
            return
        folder = folder.parent


def _own() -> Cgroup | None:
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


CLOSE = 0.9
JETSAM_REPORTS = Path("/Library/Logs/DiagnosticReports")
RECENT_S = 60.0
TOGETHER_S = 10.0
"""From the first of the processes that one shortage took to the end of the last: the larger they
are, the longer their memory takes to be given back."""


class OomWatch:
    """Remembers how many OOM kills there were. Each is evidence for one process; where one shortage
    took several, the others are noticed soon after the first."""

    def __init__(
        self,
        oom_kills: Callable[[], int | None] = oom_kills,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._count = oom_kills
        self._clock = clock
        self._seen = oom_kills()
        self._grown = ""
        self._grown_at = float("-inf")
        self._left = 0

    def look(self) -> None:
        """To be called every second or so: what was killed long ago was not what dies now."""
        counted, now = self._count(), self._clock()
        before, self._seen = self._seen, counted
        if now - self._grown_at > TOGETHER_S:
            self._left = 0
        if counted is not None and before is not None and counted > before:
            self._left += counted - before
            self._grown_at = now
            self._grown = (
                f"the kernel's count of out-of-memory kills went from {before} to {counted}"
            )

    def evidence(self, pid: int, footprint: int, limit: int) -> str:
        """What shows that the process that just died was killed for its memory; empty if nothing
        does. Sizes are bytes; a limit of 0 is none."""
        self.look()
        if self._left:
            self._left -= 1
            return self._grown
        if sys.platform == "darwin" and (report := jetsam_report(pid, JETSAM_REPORTS)):
            return f"jetsam reports it in {report.name}"
        if limit and footprint >= CLOSE * limit:
            return f"its memory was {footprint / 1e9:.1f} GB of {limit / 1e9:.1f} GB"
        return ""


def jetsam_report(pid: int, folder: Path) -> Path | None:
    """The report of the last minute that says that a process was killed, if there is one.

    A report is two JSON documents: a line about itself, then the state of all processes, in which
    one that was killed has a ``reason``.
    """
    try:
        reports = sorted(folder.glob("JetsamEvent-*.ips"), reverse=True)
        for report in reports:
            if time.time() - report.stat().st_mtime > RECENT_S:
                continue
            _, _, body = report.read_text(errors="replace").partition("\n")
            for process in json.loads(body).get("processes", []):
                if process.get("pid") == pid and process.get("reason"):
                    return report
    except (OSError, ValueError):
        return None  # not ours to read, or of another form
    return None
