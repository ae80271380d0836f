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
    """Watches the list ``nodes`` in a TOML configuration file.

    ``use_nodes`` is called with the node addresses whenever the file has changed; it raises
    AddressError if they cannot be used. In that case, and if the file is not TOML or lists no
    nodes, an error is logged and the previous nodes stay in use.
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
        """The file's text; an empty text, which lists no nodes, if the file cannot be read."""
        try:
            return self._file.read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            return ""


def nodes_in(content: str) -> list[str]:
    """The node addresses listed in a configuration file's text. Raises AddressError if the text is
    not TOML or lists no nodes."""
    try:
        nodes = tomllib.loads(content).get("nodes")
    except tomllib.TOMLDecodeError as error:
        raise AddressError(f"the file is not TOML: {error}") from error
    if not isinstance(nodes, list) or not nodes or not all(isinstance(n, str) for n in nodes):
        raise AddressError('the file lists no nodes, as in nodes = ["tcp://KEY@mac-2.local:7700"]')
    return nodes
