"""Detection of changes of a file."""

from __future__ import annotations

from pathlib import Path


class FileWatch:
    """Detects changes of a file: compares its modification time, size and inode number with their
    values at the last check. A file that cannot be read counts as absent."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = self._stamp()

    def changed(self) -> bool:
        """Returns True if the file has changed, appeared, been replaced or been removed since the
        last call."""
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
