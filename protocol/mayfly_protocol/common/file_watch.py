"""Notices that a file has changed."""

from __future__ import annotations

from pathlib import Path


class FileWatch:
    """Compares a file's modification time, size and inode number with those last seen. A file that
    cannot be read counts as absent."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = self._stamp()

    def changed(self) -> bool:
        """Returns True once after each change: also when the file appears, goes or is replaced."""
        stamp = self._stamp()
        if stamp == self._seen:
            return False
        self._seen = stamp
        return True

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino
