"""Whether the system may have killed a worker for its memory.

SIGKILL leaves no words. What is looked at, and none of it is proof:

* the kernel's count of OOM kills has just grown (Linux);
* a report of jetsam's names the process (macOS; tested with a report made by hand only);
* the process's last footprint was close to what it may have.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from mayfly_reaper import cgroups

CLOSE = 0.9
JETSAM_REPORTS = Path("/Library/Logs/DiagnosticReports")
RECENT_S = 60.0
TOGETHER_S = 10.0
"""From the first of the processes that one shortage took to the end of the last: the larger they
are, the longer their memory takes to be given back."""


class Pressure:
    """Remembers how many OOM kills there were. Each is evidence for one process; where one shortage
    took several, the others are noticed soon after the first."""

    def __init__(
        self,
        oom_kills: Callable[[], int | None] = cgroups.oom_kills,
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
