"""Fetching of a model into the cache, by a process of its own.

Fetching needs MLX, so ``mayfly_worker.fetch`` runs as a process and is not imported. It writes one
JSON object per line::

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

STOP_S = 3.0
"""Time from SIGTERM to SIGKILL."""

OnProgress = Callable[[str, int, int], None]
"""Receives the step, the bytes that are done and those in all (0 of 0: not known)."""


class FetchFailed(Exception):
    """A model that could not be fetched; the text is the reason."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """A model in a local folder, and its name."""

    path: Path
    name: str


def fetch(command: Sequence[str], on_progress: OnProgress) -> Fetched:
    """Runs a fetch to its end.

    The child process does not outlive this call: an exception, such as Ctrl-C's, ends it first.

    Raises:
        FetchFailed: the child reported an error, or ended without an event.
    """
    # A terminal's Ctrl-C goes to a whole process group. In a session of its own the child does not
    # get it, and is ended from here, without a traceback between the progress bars.
    with tempfile.TemporaryFile() as stderr:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            encoding="utf-8",
            start_new_session=True,
        )
        assert child.stdout is not None
        with child.stdout:
            try:
                fetched = read_events(child.stdout, on_progress)
                status = child.wait()
            except BaseException:
                _end(child)
                raise
        if fetched is None:
            raise FetchFailed(f"fetching ended with status {status}: {_last_line(stderr)}")
        return fetched


def read_events(lines: Iterable[str], on_progress: OnProgress) -> Fetched | None:
    """Reads a fetch's events; returns None if they end without the last one.

    Raises:
        FetchFailed: an event is an error, or a line is no event.
    """
    for line in lines:
        try:
            event = json.loads(line)
            match event["event"]:
                case "progress":
                    on_progress(event["what"], int(event["done"]), int(event["total"]))
                case "done":
                    return Fetched(Path(event["path"]), str(event["name"]))
                case "error":
                    raise FetchFailed(str(event["message"]))
        except (ValueError, LookupError, TypeError) as error:
            raise FetchFailed(
                f"fetching printed {line.strip()[:200]!r}, which is no event"
            ) from error
    return None


def _end(child: subprocess.Popen[str]) -> None:
    child.terminate()
    try:
        child.wait(STOP_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _last_line(stderr: IO[bytes]) -> str:
    stderr.seek(0)
    lines = stderr.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
