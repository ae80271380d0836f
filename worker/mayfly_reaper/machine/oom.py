"""Evidence that the operating system has killed a worker for its memory.

SIGKILL leaves no message. Each of these facts counts as evidence; none of them is proof:

* the kernel's count of OOM kills has just grown (Linux);
* a jetsam report names the process (macOS; tested with a report made by hand only);
* the process's last memory footprint was close to its limit.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from mayfly_reaper.machine.cgroups import oom_kills

CLOSE_TO_LIMIT = 0.9
JETSAM_REPORTS = Path("/Library/Logs/DiagnosticReports")
RECENT_S = 60.0
ONE_SHORTAGE_S = 10.0
"""Seconds from the first process killed in a shortage of memory to the end of the last process
killed in it: large processes take long to give their memory back."""


class OomWatch:
    """Count of the kernel's out-of-memory kills that have not been matched with a lost worker yet.
    Each kill is evidence for one lost worker. A shortage of memory may kill several workers, whose
    ends are noticed one after the other: a kill stays evidence for ``ONE_SHORTAGE_S`` seconds."""

    def __init__(
        self,
        oom_kills: Callable[[], int | None] = oom_kills,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._oom_kills = oom_kills
        self._clock = clock
        self._counted = oom_kills()
        self._unassigned = 0
        self._grown_at = float("-inf")
        self._evidence = ""

    def poll(self) -> None:
        """Reads the kernel's count of out-of-memory kills. To be called every second or so: a kill
        of long ago is no evidence for a process that dies now."""
        counted, now = self._oom_kills(), self._clock()
        before, self._counted = self._counted, counted
        if now - self._grown_at > ONE_SHORTAGE_S:
            self._unassigned = 0
        if counted is not None and before is not None and counted > before:
            self._unassigned += counted - before
            self._grown_at = now
            self._evidence = (
                f"the kernel's count of out-of-memory kills went from {before} to {counted}"
            )

    def evidence(self, pid: int, footprint: int, limit: int) -> str:
        """Returns the evidence that the process that just died was killed for its memory; empty if
        there is none. Sizes are in bytes; a ``limit`` of 0 stands for no limit."""
        self.poll()
        if self._unassigned:
            self._unassigned -= 1
            return self._evidence
        if sys.platform == "darwin" and (report := jetsam_report(pid, JETSAM_REPORTS)):
            return f"jetsam reports it in {report.name}"
        if limit and footprint >= CLOSE_TO_LIMIT * limit:
            return f"its memory was {footprint / 1e9:.1f} GB of {limit / 1e9:.1f} GB"
        return ""


def jetsam_report(pid: int, folder: Path) -> Path | None:
    """Returns macOS's report from the last minute that says that the process ``pid`` was killed for
    memory; None if there is no such report.

    A report is two JSON documents: a line about the report itself, then the state of all processes,
    in which a killed process has a ``reason``.
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
