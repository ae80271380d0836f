"""What a fetch says while it runs: one JSON object a line, the last one its outcome.

::

    {"event": "progress", "what": "download" | "convert", "done": bytes, "total": bytes}
    {"event": "done", "path": folder, "name": what to call the model}    then exit code 0
    {"event": "error", "message": sentences}                             then exit code 3

Progress comes any number of times, before the others. A total of 0 means that it is not known.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TextIO

What = Literal["download", "convert"]
Report = Callable[[What, int, int], None]

INTERVAL_S = 0.1


class Events:
    """Writes events to ``out``, progress at most every :data:`INTERVAL_S`.

    The first and the last of each kind of progress are never left out, and none comes twice.
    """

    def __init__(self, out: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out
        self._clock = clock
        self._told: tuple[What, int, int] | None = None
        self._due = 0.0

    def progress(self, what: What, done: int, total: int) -> None:
        now = self._clock()
        whole = 0 < total <= done
        begins = self._told is None or self._told[0] != what
        if self._told == (what, done, total) or not (begins or whole or now >= self._due):
            return
        self._told, self._due = (what, done, total), now + INTERVAL_S
        self._write(event="progress", what=what, done=done, total=total)

    def done(self, path: Path, name: str) -> None:
        self._write(event="done", path=str(path), name=name)

    def error(self, message: str) -> None:
        self._write(event="error", message=message)

    def _write(self, **event: str | int) -> None:
        self._out.write(json.dumps(event) + "\n")
        self._out.flush()
