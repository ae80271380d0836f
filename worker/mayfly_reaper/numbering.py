"""The numbers of incarnations: 1, 2, 3, and on over the reaper's restarts.

A worker that outlives a killed reaper comes back to its successor's socket under the routing id
that it had. Were its number given again, the successor would take its words for those of a worker
of its own, and the socket would turn that one away.
"""

from __future__ import annotations

import logging
from pathlib import Path

from mayfly_reaper.errors import StartError
from mayfly_reaper.paths import rewrite

_log = logging.getLogger(__name__)


class Numbers:
    """Counts in a file of the state directory, which its caller holds.

    Raises:
        StartError: the file is there and cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._last = int(path.read_text()) if path.exists() else 0
        except (OSError, ValueError) as error:
            raise StartError(f"cannot read a number from {path}: {error}; remove it") from error

    def take(self) -> int:
        """The next number. One that cannot be written down is good for this reaper's life."""
        self._last += 1
        try:
            rewrite(self._path, f"{self._last}\n")
        except OSError as error:
            _log.warning("could not write to %s: %s", self._path, error)
        return self._last
