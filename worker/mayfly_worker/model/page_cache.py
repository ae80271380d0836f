"""Reads weight files into the system's page cache, on a thread of its own.

A GPU command that waits for a weight file to be read from disk can exceed the GPU watchdog's time
limit, so the files are read once before MLX opens them. Reading needs the disk, and a worker's
imports need a CPU core for a second or more, so both happen at the same time. This module therefore
must not import MLX, one of the slow imports.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

Watcher = Callable[[int, int], None]
"""Callback for progress: bytes done, bytes in all."""

_READ = 8 << 20


class WeightReader:
    """Reads files from beginning to end, which puts them into the page cache, on a thread that
    starts at once."""

    def __init__(self, files: list[Path]) -> None:
        self._files = files
        self._changed = threading.Condition()
        self._done = self._total = 0
        self._begun = self._over = False
        self._error: OSError | None = None
        threading.Thread(target=self._read, name="weight-reader", daemon=True).start()

    def follow(self, watcher: Watcher) -> None:
        """Calls ``watcher`` with the bytes read so far and the bytes in all, until all files are
        read.

        Raises:
            OSError: a file cannot be read.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._begun or self._over)
        watcher(0, self._total)
        done, over = 0, False
        while not over:
            done, over = self._wait_beyond(done)
            watcher(done, self._total)
        if self._error is not None:
            raise self._error

    def _wait_beyond(self, done: int) -> tuple[int, bool]:
        """Waits until more than ``done`` bytes are read, or reading has ended; returns the number
        of bytes read, and True if reading has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._done > done)
            return self._done, self._over

    def _read(self) -> None:
        try:
            with self._changed:
                self._total = sum(file.stat().st_size for file in self._files)
                self._begun = True
                self._changed.notify()
            buffer = bytearray(_READ)
            for path in self._files:
                with path.open("rb", buffering=0) as file:
                    while n := file.readinto(buffer):
                        self._advance(n)
        except OSError as error:
            self._error = error
        finally:
            with self._changed:
                self._over = True
                self._changed.notify()

    def _advance(self, read: int) -> None:
        with self._changed:
            self._done += read
            self._changed.notify()
