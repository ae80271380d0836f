"""A reader of a ZeroMQ socket on an asyncio event loop, without a task or a queue in between.

The file descriptor of a ZeroMQ socket is edge-triggered, and any call on the socket may consume the
edge. So after every send the socket has to be read, although the event loop did not see it become
readable. One callback per message costs a sixth of the time that ``zmq.asyncio`` takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import zmq

_BURST = 256
"""Number of messages handled at once before other callbacks of the event loop get their turn."""


class ZmqReader:
    """Calls ``deliver`` with the frames of every message that a ZeroMQ socket receives, on the
    thread of the running event loop."""

    def __init__(self, socket: zmq.Socket[Any], deliver: Callable[[list[bytes]], None]) -> None:
        self._socket = socket
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._fd = socket.FD
        self._scheduled: asyncio.Handle | None = None
        self._loop.add_reader(self._fd, self._read)
        self._read_soon()  # the edge of messages that came earlier is lost

    def send(self, frame: bytes) -> None:
        """Sends a message of one frame. Raises zmq.Again if no peer is connected, or if the peer
        does not read its messages."""
        self._socket.send(frame, zmq.NOBLOCK)
        self._read_soon()

    def drain(self) -> None:
        """Delivers all messages that the socket has received up to now."""
        while not self._socket.closed and self._receive():
            pass

    def close(self) -> None:
        """Stops reading, and closes the socket."""
        if self._socket.closed:
            return
        if self._scheduled is not None:
            self._scheduled.cancel()
        self._loop.remove_reader(self._fd)
        self._socket.close(linger=0)

    def _read_soon(self) -> None:
        if self._scheduled is None:
            self._scheduled = self._loop.call_soon(self._read)

    def _read(self) -> None:
        self._scheduled = None
        for _ in range(_BURST):
            if self._socket.closed or not self._receive():
                return
        self._read_soon()

    def _receive(self) -> bool:
        try:
            parts = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._deliver(parts)
        return True
