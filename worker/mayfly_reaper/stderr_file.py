"""What a worker writes to stderr, kept for its autopsy.

A file and not a pipe: a reaper that is busy, stopped or gone then never blocks or kills a worker
that has something to say.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

KEPT_BYTES = 64 << 10
MOST_BYTES = 4 << 20


class StderrFile:
    """Open for appending; ``fileno()`` is for the process that writes. Without a path nothing is
    kept.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, path: Path | None) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        self._path = path
        self._descriptor = os.open(path if path is not None else os.devnull, flags, 0o600)

    def fileno(self) -> int:
        return self._descriptor

    def tail(self) -> str:
        """The last :data:`KEPT_BYTES`, from the beginning of a line."""
        size = os.fstat(self._descriptor).st_size
        start = max(0, size - KEPT_BYTES)
        end = os.pread(self._descriptor, KEPT_BYTES, start)
        if start:
            end = end.partition(b"\n")[2] or end
        return end.decode(errors="replace")

    def trim(self) -> None:
        """Forgets all but the tail if there is too much. What is written meanwhile may be lost;
        appending goes on at the new end."""
        if os.fstat(self._descriptor).st_size > MOST_BYTES:
            tail = self.tail()
            os.ftruncate(self._descriptor, 0)
            with suppress(OSError):  # a full disk: then there is no tail
                os.write(self._descriptor, tail.encode())

    def close(self) -> None:
        """Closes and removes it."""
        os.close(self._descriptor)
        if self._path is not None:
            self._path.unlink(missing_ok=True)
