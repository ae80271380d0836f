"""Events of the process that fetches a model: one JSON object a line, the last one its outcome.

::

    {"event": "progress", "what": "download" | "convert", "done": bytes, "total": bytes}
    {"event": "done", "path": folder, "name": what to call the model}    then exit code 0
    {"event": "error", "message": sentences}                             then exit code 3

Progress comes any number of times before the outcome. A total of 0 means that the total is not
known. The message of an ``error`` event is the text of a :class:`FetchError`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TextIO

Stage = Literal["download", "convert"]
Report = Callable[[Stage, int, int], None]
"""Callback for progress: stage (``download`` or ``convert``), bytes done, bytes in all."""

INTERVAL_S = 0.1


class FetchError(Exception):
    """A model can be neither found nor downloaded; the text tells the user why and what to do, in
    sentences."""


def claim_stdout() -> TextIO:
    """Returns stdout for this program's own lines; anything that a library or a model's code prints
    goes to stderr from now on."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return out


class EventWriter:
    """Writes the events of fetching a model to ``out`` as JSON lines, progress at most every tenth
    of a second.

    The first and the last progress of each stage are never left out, and no progress is written
    twice.
    """

    def __init__(self, out: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out
        self._clock = clock
        self._last: tuple[Stage, int, int] | None = None
        self._due = 0.0

    def progress(self, stage: Stage, done: int, total: int) -> None:
        now = self._clock()
        whole = 0 < total <= done
        begins = self._last is None or self._last[0] != stage
        if self._last == (stage, done, total) or not (begins or whole or now >= self._due):
            return
        self._last, self._due = (stage, done, total), now + INTERVAL_S
        self._write(event="progress", what=stage, done=done, total=total)

    def done(self, path: Path, name: str) -> None:
        self._write(event="done", path=str(path), name=name)

    def error(self, message: str) -> None:
        self._write(event="error", message=message)

    def _write(self, **event: str | int) -> None:
        self._out.write(json.dumps(event) + "\n")
        self._out.flush()
