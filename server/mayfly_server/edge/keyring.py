"""The keys that open a server: those of its environment, and those of a file that may change while
it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

import structlog

from mayfly_server.edge import keys
from mayfly_server.edge.keys import Key, KeysError

LOOK_INTERVAL_S = 1.0

_log = structlog.get_logger(__name__)


class Keyring:
    """Reads ``file`` at once. Raises KeysError where that does not work: a server that was meant
    to be locked must not start open."""

    def __init__(self, fixed: tuple[Key, ...] = (), file: Path | None = None) -> None:
        self._fixed = fixed
        self._file = file
        self._seen = _stamp(file)
        self._read = keys.read(file) if file is not None else ()

    @property
    def locked(self) -> bool:
        """Whether anything needs a key."""
        return bool(self._fixed) or self._file is not None

    def find(self, presented: Iterable[str]) -> Key | None:
        return keys.find((*self._fixed, *self._read), presented)

    def look(self) -> None:
        """Reads the file again if it has changed. One that cannot be used changes nothing: the
        keys that were known go on being known, and the log says why."""
        stamp = _stamp(self._file)
        if self._file is None or stamp == self._seen:
            return
        self._seen = stamp
        try:
            self._read = keys.read(self._file)
        except KeysError as error:
            _log.error("the keys stay as they were", reason=str(error))
            return
        _log.info("keys read again", keys=[key.name for key in self._read])

    async def watch(self) -> None:
        """Looks again and again, until it is cancelled."""
        while self._file is not None:
            await asyncio.sleep(LOOK_INTERVAL_S)
            await asyncio.to_thread(self.look)


def _stamp(file: Path | None) -> tuple[int, int, int] | None:
    """What changes when a file does, or is replaced by another."""
    try:
        found = file.stat() if file is not None else None
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size, found.st_ino) if found else None
