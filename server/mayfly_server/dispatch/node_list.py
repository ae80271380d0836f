"""The list of nodes in a configuration file, read again whenever the file changes."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path

import structlog

from mayfly_protocol.common.file_watch import FileWatch
from mayfly_protocol.transport.addresses import AddressError

_log = structlog.get_logger(__name__)


class NodeList:
    """Watches the key ``nodes`` of a TOML file.

    ``use_nodes`` is called with every new list, and raises AddressError where the list cannot be
    used. Then the nodes stay as they were; they do, too, where the file is no TOML or names none.
    """

    def __init__(self, file: Path, use_nodes: Callable[[Iterable[str]], None]) -> None:
        self._file = file
        self._use_nodes = use_nodes
        self._watch = FileWatch(file)

    def reload_if_changed(self) -> None:
        if not self._watch.changed():
            return
        try:
            nodes = nodes_in(self._content())
            self._use_nodes(nodes)
        except AddressError as error:
            _log.error(
                "node list not reloaded, the previous nodes stay in use",
                file=str(self._file),
                reason=str(error),
            )
            return
        _log.info("node list reloaded", nodes=[node.rpartition("@")[2] for node in nodes])

    def _content(self) -> str:
        """The file's text; empty, which names no node, if it cannot be read."""
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
