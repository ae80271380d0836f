"""Encoding of messages as frames: ``msgpack([version, name, fields])``, one message per frame.

A :class:`Channel` accepts the messages of one direction between two kinds of process, such as front
end to worker, and no others. Unknown fields are ignored (a newer process of the same major version
may send them); unknown message names and wrong types raise :class:`BadFrame`. Nothing in a frame is
executed, or looked up by name outside the channel's own table.
"""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any, Generic, Literal, TypeVar, get_args

import msgpack
from pydantic import TypeAdapter, ValidationError

from mayfly_protocol import PROTOCOL_VERSION
from mayfly_protocol.lifecycle import ToReaper, ToSlot
from mayfly_protocol.roster import AskMetrics, FromNode, MetricsText, Roster, ToNode
from mayfly_protocol.serving import ToFrontEnd, ToWorker

M = TypeVar("M")


class BadFrame(ValueError):
    """A frame that is not a message of its channel (such as front end to worker). The text explains
    the error; ``reason`` is a short label for counters."""

    reason: Literal["nonsense", "version"] = "nonsense"


class OtherVersion(BadFrame):
    """A frame of another major version of the protocol."""

    reason = "version"


def _as_map(value: Any) -> dict[str, Any]:
    if not is_dataclass(value):
        raise TypeError(f"{type(value).__name__} cannot travel in a frame")
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def encode(message: object) -> bytes:
    """Encodes a message as a frame.

    A lone surrogate, which Python puts for a byte of a file name that is not UTF-8, is written as
    an escape sequence.

    Raises:
        TypeError: the message holds a value that MessagePack has no type for.
    """
    body = [PROTOCOL_VERSION, type(message).__name__, _as_map(message)]
    packed: bytes = msgpack.packb(body, default=_as_map, unicode_errors="backslashreplace")
    return packed


SINCE: dict[type, int] = {AskMetrics: 1, MetricsText: 1}
"""Minor protocol versions in which messages were added; messages that are not listed are as old as
the major version."""


def understood(message: object, minor: int) -> bool:
    """Returns True if a process with the minor protocol version ``minor`` knows this message."""
    return SINCE.get(type(message), 0) <= minor


class Channel(Generic[M]):
    """Decoder for the messages that one kind of process sends to another, such as front end to
    worker. It accepts the message types ``messages`` and refuses all others."""

    def __init__(self, *messages: type) -> None:
        self._adapters: dict[str, TypeAdapter[M]] = {m.__name__: TypeAdapter(m) for m in messages}

    def decode(self, frame: bytes | memoryview) -> M:
        """Decodes a frame into a message.

        Raises:
            OtherVersion: the frame is of another major version of the protocol.
            BadFrame: the frame is not MessagePack, its message does not belong on this channel, or
                its fields do not fit the message.
        """
        try:
            body = msgpack.unpackb(frame, strict_map_key=False)
        except Exception as error:
            # msgpack raises ValueError, exceptions of its own or UnicodeDecodeError; all of them
            # mean that the bytes are no MessagePack.
            raise BadFrame(f"not a MessagePack frame: {type(error).__name__}") from error
        if not isinstance(body, list) or len(body) != 3:
            raise BadFrame("a frame is [version, name, fields]")
        version, name, content = body
        if version != PROTOCOL_VERSION:
            raise OtherVersion(
                f"protocol version {str(version)[:20]}, this side speaks {PROTOCOL_VERSION}"
            )
        adapter = self._adapters.get(name) if isinstance(name, str) else None
        if adapter is None:
            raise BadFrame(f"no message {str(name)[:40]!r} on this channel")
        try:
            return adapter.validate_python(content)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(str(part) for part in first["loc"])
            raise BadFrame(f"{name}.{place}: {first['msg']}") from error
        except RecursionError as error:
            raise BadFrame(f"{name}: nested too deeply") from error


def _channel(union: Any) -> Channel[Any]:
    return Channel(*(get_args(union) or (union,)))


to_worker: Channel[ToWorker] = _channel(ToWorker)
to_front_end: Channel[ToFrontEnd] = _channel(ToFrontEnd)
to_reaper: Channel[ToReaper] = _channel(ToReaper)
to_slot: Channel[ToSlot] = _channel(ToSlot)
to_node: Channel[ToNode] = _channel(ToNode)
from_node: Channel[FromNode] = _channel(FromNode)
rosters: Channel[Roster] = _channel(Roster)
