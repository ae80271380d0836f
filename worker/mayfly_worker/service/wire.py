"""The two sockets of a worker: a ROUTER for front ends and a DEALER to the reaper.

A frame that is no message of its channel changes nothing; it is counted and logged, and who sent
it is named.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import structlog
import zmq

from mayfly_protocol import codec, sockets
from mayfly_protocol.lifecycle import ToReaper, ToSlot
from mayfly_protocol.serving import ToFrontEnd, ToWorker
from mayfly_protocol.settings import WorkerSettings
from mayfly_worker.service.outbox import Outbox

log = structlog.get_logger()


class Wire:
    """Made before the model is loaded; front ends can reach it only after :meth:`listen`."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self.reaper = self._context.socket(zmq.DEALER)
        sockets.configure(self.reaper)
        name = f"{settings.slot}#{settings.incarnation}"
        self.reaper.setsockopt(zmq.ROUTING_ID, name.encode())
        self.reaper.connect(settings.control)
        self.router = self._context.socket(zmq.ROUTER)
        sockets.configure(self.router)
        self.outbox = Outbox(self.router)
        self._listen = settings.listen
        self.bad_frames = 0

    def listen(self) -> str:
        """Lets front ends in; returns the endpoint."""
        self.router.bind(self._listen)
        return self.router.getsockopt_string(zmq.LAST_ENDPOINT)

    def tell_reaper(self, message: ToReaper) -> None:
        """Never waits: a reaper that is away misses it."""
        try:
            self.reaper.send(codec.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            log.warning("reaper does not read", message=type(message).__name__)

    def send(self, peer: bytes, message: ToFrontEnd) -> None:
        self.outbox.send(peer, codec.encode(message))

    def from_front_ends(self) -> Iterator[tuple[bytes, ToWorker]]:
        """What has arrived, without waiting."""
        while (parts := _receive(self.router)) is not None:
            peer, *frames = parts
            if len(frames) != 1:
                self._refuse(peer, f"{len(frames)} frames instead of one")
                continue
            try:
                yield peer, codec.to_worker.decode(frames[0])
            except codec.BadFrame as error:
                self._refuse(peer, str(error))

    def from_reaper(self) -> Iterator[ToSlot]:
        while (parts := _receive(self.reaper)) is not None:
            try:
                yield codec.to_slot.decode(parts[-1])
            except codec.BadFrame as error:
                self._refuse(b"reaper", str(error))

    def _refuse(self, peer: bytes, why: str) -> None:
        self.bad_frames += 1
        log.warning("frame refused", peer=peer.hex(), why=why)

    def farewell(self, seconds: float) -> None:
        """Gives what was said last so long to leave the process, then closes."""
        self.outbox.flush()
        for socket in (self.reaper, self.router):
            socket.setsockopt(zmq.LINGER, int(seconds * 1000))
            socket.close()
        self._context.term()


def _receive(socket: zmq.Socket[Any]) -> list[bytes] | None:
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
