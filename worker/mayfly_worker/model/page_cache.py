"""Reading weight files into the system's page cache, beside everything else.

A weight file that is read from disk while a GPU command waits for it is a watchdog timeout, so the
files are read once before MLX sees them. That takes a disk; a worker's imports, a second and more,
take a core: they happen at the same time. So this module is imported before MLX, and without it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

Watcher = Callable[[int, int], None]
"""Bytes done, bytes in all."""

_READ = 8 << 20


def weight_files(folder: Path) -> list[Path]:
    """The files that mlx-lm reads weights from."""
    return sorted(folder.glob("model*.safetensors"))


class WeightReader:
    """Reads files from beginning to end on a thread of its own, from now on."""

    def __init__(self, files: list[Path]) -> None:
        self._files = files
        self._changed = threading.Condition()
        self._done = self._total = 0
        self._begun = self._over = False
        self._error: OSError | None = None
        threading.Thread(target=self._read, name="warming", daemon=True).start()

    def follow(self, watcher: Watcher) -> None:
        """Tells how far it has come until all is read. Raises OSError if a file cannot be."""
        with self._changed:
            self._changed.wait_for(lambda: self._begun or self._over)
        watcher(0, self._total)
        told, over = 0, False
        while not over:
            told, over = self._after(told)
            watcher(told, self._total)
        if self._error is not None:
            raise self._error

    def _after(self, told: int) -> tuple[int, bool]:
        """How many bytes are read, once there are more; and whether that is all."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._done > told)
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
                        self._moved(n)
        except OSError as error:
            self._error = error
        finally:
            with self._changed:
                self._over = True
                self._changed.notify()

    def _moved(self, read: int) -> None:
        with self._changed:
            self._done += read
            self._changed.notify()
