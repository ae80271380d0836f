"""Fetching of a model into the local cache, in a child process.

Fetching needs MLX, which the ``mayfly`` process does not import, so ``mayfly_worker.fetch`` runs as
a child process. The child writes one JSON object per line to stdout::

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
"""Seconds from SIGTERM to SIGKILL when the child process is ended early."""

OnProgress = Callable[[str, int, int], None]
"""Function that receives the progress: the step (``download`` or ``convert``), the bytes done and
the total bytes (0 and 0 if they are not known)."""


class FetchFailed(Exception):
    """A model could not be fetched; the text is the reason."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """A fetched model: its local folder, and its name."""

    path: Path
    name: str


def fetch(command: Sequence[str], on_progress: OnProgress) -> Fetched:
    """Runs the child process ``command`` that fetches a model, until it ends.

    If the wait is interrupted by an exception, such as KeyboardInterrupt, the child is ended before
    the exception is passed on.

    Raises:
        FetchFailed: the child reported an error, or ended without the event ``done``.
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
    """Reads the events, one JSON object per line, of a child process that fetches a model. Returns
    None if the lines end before the event ``done``.

    Raises:
        FetchFailed: the child reported an error, or a line is not an event.
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
