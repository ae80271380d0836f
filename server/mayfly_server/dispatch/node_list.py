"""The nodes that a front end uses, as a configuration file names them, and as that changes."""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path

import structlog

from mayfly_protocol.transport.addresses import AddressError

LOOK_INTERVAL_S = 1.0

_log = structlog.get_logger(__name__)


class NodeList:
    """Follows the key ``nodes`` of a TOML file. ``follow`` is called with another list, and raises
    AddressError where it cannot be used: then the nodes stay as they were, as they do where the
    file is no TOML, or names none."""

    def __init__(self, file: Path, follow: Callable[[Iterable[str]], None]) -> None:
        self._file = file
        self._follow = follow
        self._seen = self._content()

    def look(self) -> None:
        """Reads the file again, and acts if it has changed."""
        content = self._content()
        if content == self._seen:
            return
        self._seen = content
        try:
            nodes = nodes_in(content)
            self._follow(nodes)
        except AddressError as error:
            _log.error("the nodes stay as they were", file=str(self._file), reason=str(error))
            return
        _log.info("nodes read again", nodes=[node.rpartition("@")[2] for node in nodes])

    async def watch(self) -> None:
        """Looks again and again, until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            self.look()

    def _content(self) -> str:
        """Empty where the file cannot be read: that names no node."""
        try:
            return self._file.read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            return ""


def nodes_in(content: str) -> list[str]:
    """The nodes that a configuration names. Raises AddressError if it names none."""
    try:
        nodes = tomllib.loads(content).get("nodes")
    except tomllib.TOMLDecodeError as error:
        raise AddressError(f"no TOML: {error}") from error
    if not isinstance(nodes, list) or not nodes or not all(isinstance(n, str) for n in nodes):
        raise AddressError('it names no nodes, as in nodes = ["tcp://KEY@mac-2.local:7700"]')
    return nodes
