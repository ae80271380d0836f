"""The two sockets of a worker: a ROUTER for front ends and a DEALER to the reaper.

A frame that is no message of its channel changes nothing; it is counted and logged, and who sent
it is named. On TCP an authenticator says who may connect, and whose key has been revoked since.

What is still owed to each front end.

A ROUTER that may not block refuses a message in two ways: EHOSTUNREACH, the peer is gone; EAGAIN,
it does not read. In the second case messages wait here, in order, up to a bound in bytes; then the
peer is given up. The engine never waits for a slow reader.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import zmq

from mayfly_protocol import codec
from mayfly_protocol.lifecycle import ToReaper, ToSlot
from mayfly_protocol.serving import ToFrontEnd, ToWorker
from mayfly_protocol.settings import WorkerSettings
from mayfly_protocol.transport import sockets
from mayfly_protocol.transport.addresses import host_and_range, is_loopback
from mayfly_protocol.transport.keys import TrustList, new_pair
from mayfly_protocol.transport.zap import Refusals, ZapAuthenticator, peer_address, user

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


FRAMES_A_ROUND = 1000
"""So that no flood of words keeps the worker from its beats."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Peer:
    """Who sent a message; both are empty where that is nobody's business, on ipc."""

    key: str = ""
    address: str = ""


_NOBODY = _Peer()


class CannotListen(Exception):
    """There is no place where front ends could reach this worker."""


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
        self.refusals = Refusals(log.warning)
        self.public_key = ""
        self._zap: ZapAuthenticator | None = None
        self._peers: dict[bytes, _Peer] = {}
        """Those that have been heard on TCP, by their routing ids."""
        if settings.trusted:
            pair = new_pair()
            self.public_key = pair.public
            trusted = TrustList(Path(settings.trusted))
            self._zap = ZapAuthenticator(self._context, trusted, self.refusals)
            self._zap.guard(self.router, "worker", pair)
        self._listen = settings.listen
        self._number = settings.incarnation

    @property
    def polled(self) -> list[zmq.Socket[Any]]:
        """Sockets that :meth:`attend` has to be called for."""
        return self._zap.sockets if self._zap is not None else []

    def listen(self) -> str:
        """Lets front ends in; returns the endpoint, as the roster is to have it.

        Raises:
            CannotListen: it cannot be bound, or none of its ports can; or others could reach it
                and it has no key.
        """
        try:
            if not self._listen.startswith("tcp://"):
                self.router.bind(self._listen)
                return self.router.getsockopt_string(zmq.LAST_ENDPOINT)
            host, ports = host_and_range(self._listen.removeprefix("tcp://"))
            if self._zap is None and not is_loopback(host):
                raise CannotListen(f"others can reach {host}, and this worker has no key")
            sockets.configure_tcp(self.router, host)
            return f"tcp://*:{bind_one(self.router, host, ports.beginning_with(self._number))}"
        except zmq.ZMQError as error:
            raise CannotListen(f"cannot listen on {self._listen}: {error.strerror}") from error

    def attend(self) -> None:
        """Answers peers that want to connect. One whose key has been revoked hears no more."""
        if self._zap is None:
            return
        revoked = self._zap.poll()
        for peer, known in list(self._peers.items()) if revoked else ():
            if known.key in revoked:
                self.refusals.refuse(known.address, "revoked", f"key {known.key} hears no more")
                self.outbox.give_up(peer)
                del self._peers[peer]

    def tell_reaper(self, message: ToReaper) -> None:
        """Never waits: a reaper that is away misses it."""
        try:
            self.reaper.send(codec.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            log.warning("reaper does not read", message=type(message).__name__)

    def send(self, peer: bytes, message: ToFrontEnd) -> None:
        self.outbox.send(peer, codec.encode(message))

    def forget(self, peer: bytes) -> None:
        """This peer is gone."""
        self.outbox.forget(peer)
        self._peers.pop(peer, None)

    def from_front_ends(self) -> Iterator[tuple[bytes, ToWorker]]:
        """What has arrived, without waiting."""
        arrived = self._arrived() if self._zap is None else self._arrived_guarded(self._zap)
        for sender, (peer, *frames) in arrived:
            if len(frames) != 1:
                why = f"{len(frames)} frames instead of one"
                self.refusals.refuse(sender.address or peer.hex(), "nonsense", why)
                continue
            try:
                message = codec.to_worker.decode(frames[0])
            except codec.BadFrame as error:
                self.refusals.refuse(sender.address or peer.hex(), error.reason, str(error))
                continue
            if sender.key and peer not in self._peers:
                self._peers[peer] = sender
            yield peer, message

    def _arrived(self) -> Iterator[tuple[_Peer, list[bytes]]]:
        for _ in range(FRAMES_A_ROUND):
            if (parts := _receive(self.router)) is None:
                return
            yield _NOBODY, parts

    def _arrived_guarded(
        self, authenticator: ZapAuthenticator
    ) -> Iterator[tuple[_Peer, list[bytes]]]:
        """From peers that are trusted still."""
        for _ in range(FRAMES_A_ROUND):
            try:
                parts = self.router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if authenticator.admits(parts[-1]):
                sender = _Peer(user(parts[-1]), peer_address(parts[-1]))
                yield sender, [part.bytes for part in parts]

    def from_reaper(self) -> Iterator[ToSlot]:
        while (parts := _receive(self.reaper)) is not None:
            try:
                yield codec.to_slot.decode(parts[-1])
            except codec.BadFrame as error:
                self.refusals.refuse("the reaper", error.reason, str(error))

    def farewell(self, seconds: float) -> None:
        """Gives what was said last so long to leave the process, then closes."""
        self.outbox.flush()
        if self._zap is not None:
            self._zap.close()
        for socket in (self.reaper, self.router):
            socket.setsockopt(zmq.LINGER, int(seconds * 1000))
            socket.close()
        self._context.term()


def bind_one(router: zmq.Socket[Any], host: str, ports: Sequence[int]) -> int:
    """Binds the first port that is free, and returns it.

    Raises:
        zmq.ZMQError: none is, or the host is not this machine's.
    """
    for port in ports[:-1]:
        try:
            router.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return port
    router.bind(f"tcp://{host}:{ports[-1]}")
    return ports[-1]


def _receive(socket: zmq.Socket[Any]) -> list[bytes] | None:
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
