"""What is still owed to each front end.

A ROUTER that may not block refuses a message in two ways: EHOSTUNREACH, the peer is gone; EAGAIN,
it does not read. In the second case messages wait here, in order, up to a bound in bytes; then the
peer is given up. The engine never waits for a slow reader.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import zmq

MAX_PENDING_BYTES = 32 << 20


class Outbox:
    """Sends to the peers of one ROUTER. ``lost`` collects the peers that were given up."""

    def __init__(self, router: zmq.Socket[Any], max_bytes: int = MAX_PENDING_BYTES) -> None:
        self._router = router
        self._max_bytes = max_bytes
        self._pending: dict[bytes, deque[bytes]] = {}
        self._bytes: dict[bytes, int] = {}
        self.lost: set[bytes] = set()

    @property
    def empty(self) -> bool:
        return not self._pending

    def send(self, peer: bytes, frame: bytes) -> None:
        """Sends now, or keeps the frame behind those that wait already."""
        if peer in self.lost:
            return
        if peer not in self._pending and self._try(peer, frame):
            return
        if peer in self.lost:
            return
        self._pending.setdefault(peer, deque()).append(frame)
        self._bytes[peer] = self._bytes.get(peer, 0) + len(frame)
        if self._bytes[peer] > self._max_bytes:
            self.give_up(peer)

    def flush(self) -> None:
        """Tries again what waits."""
        for peer, frames in list(self._pending.items()):
            while frames and self._try(peer, frames[0]):
                self._bytes[peer] -= len(frames.popleft())
            if not frames:
                self.forget(peer)

    def forget(self, peer: bytes) -> None:
        """Drops what waits for a peer."""
        self._pending.pop(peer, None)
        self._bytes.pop(peer, None)

    def give_up(self, peer: bytes) -> None:
        """Sends this peer nothing any more."""
        self.forget(peer)
        self.lost.add(peer)

    def _try(self, peer: bytes, frame: bytes) -> bool:
        try:
            self._router.send_multipart([peer, frame], zmq.NOBLOCK, copy=True)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self.give_up(peer)
            return False
        return True
