"""Gets a model into the cache, by a process of its own.

``mayfly_worker.fetch`` knows models and MLX, so it is run, not imported. It writes one JSON object
a line::

    {"event": "progress", "what": "download" | "convert", "done": int, "total": int}   any number
    {"event": "done", "path": str, "name": str}  or  {"event": "error", "message": str}   the last
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

PATIENCE_S = 3.0
"""How long a fetch that was told to stop may take."""

Report = Callable[[str, int, int], None]
"""Is told what is being done, and how many of how many bytes are (0 of 0: not known)."""


class FetchFailed(Exception):
    """The model could not be had; the text says why."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """A model in a local folder, and what to call it."""

    path: Path
    name: str


def fetch(command: Sequence[str], report: Report) -> Fetched:
    """Runs a fetch to its end.

    The child does not outlive this call: an exception in it (Ctrl-C is one) ends the child first.

    Raises:
        FetchFailed: it said so, or died without a word.
    """
    # A terminal's Ctrl-C goes to a whole process group. In a session of its own the child does not
    # see it, and is ended from here, without a traceback between the progress bars.
    with tempfile.TemporaryFile() as complaints:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=complaints,
            encoding="utf-8",
            start_new_session=True,
        )
        assert child.stdout is not None
        with child.stdout:
            try:
                fetched = outcome(child.stdout, report)
                status = child.wait()
            except BaseException:
                _end(child)
                raise
        if fetched is None:
            raise FetchFailed(f"fetching ended with status {status}: {_last_line(complaints)}")
        return fetched


def outcome(lines: Iterable[str], report: Report) -> Fetched | None:
    """Follows a fetch's lines; None where they end without saying how it went.

    Raises:
        FetchFailed: it said that it failed, or what it said can't be understood.
    """
    for line in lines:
        try:
            event = json.loads(line)
            match event["event"]:
                case "progress":
                    report(event["what"], int(event["done"]), int(event["total"]))
                case "done":
                    return Fetched(Path(event["path"]), str(event["name"]))
                case "error":
                    raise FetchFailed(str(event["message"]))
        except (ValueError, LookupError, TypeError) as error:
            raise FetchFailed(f"fetching said {line.strip()[:200]!r}, which is no event") from error
    return None


def _end(child: subprocess.Popen[str]) -> None:
    child.terminate()
    try:
        child.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _last_line(complaints: IO[bytes]) -> str:
    complaints.seek(0)
    lines = complaints.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
