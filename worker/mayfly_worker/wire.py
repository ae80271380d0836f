"""The two sockets of a worker: a ROUTER for front ends and a DEALER to the reaper (the supervisor).

A frame that is not a message of its socket's protocol has no effect, except that it is counted and
logged with its sender. On TCP, ZAP (ZeroMQ's authentication) decides which peers may connect, and
messages under a key that has been revoked since are dropped.

A ROUTER that must not block refuses a message in two ways: EHOSTUNREACH if the peer is gone, EAGAIN
if the peer does not read. After EAGAIN, messages wait in the outbox, in order, up to a bound in
bytes, beyond which the peer is given up. The engine never waits for a slow reader.
"""

from __future__ import annotations

import errno
import time
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
from mayfly_protocol.settings import PEER_TIMEOUT_S, WorkerSettings
from mayfly_protocol.transport import sockets
from mayfly_protocol.transport.addresses import host_and_range, is_loopback
from mayfly_protocol.transport.keys import TrustList, new_pair
from mayfly_protocol.transport.zap import Refusals, ZapAuthenticator, peer_address, user

MAX_PENDING_BYTES = 32 << 20
"""Largest number of bytes that may wait to be sent to one front end; if more wait, the front end is
given up: its requests are cancelled and nothing more is sent to it."""
FRAMES_A_ROUND = 1000
"""Largest number of frames that one round of the main loop reads, so that no flood of messages
keeps the worker from sending its heartbeats."""

_log = structlog.get_logger()


@dataclass(slots=True)
class _Peer:
    """A front end that has sent a message to this worker. ``heard_at`` is the monotonic time of its
    last message, in seconds; ``key`` (its public key) and ``address`` are empty on ipc."""

    heard_at: float
    key: str = ""
    address: str = ""


class Outbox:
    """Messages that wait to be sent to the peers of one ROUTER socket. ``lost`` collects the peers
    that were given up because they are gone or read too slowly."""

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
        """Sends a frame to a peer now, or, if the peer does not read, keeps the frame behind the
        peer's other waiting frames."""
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
        """Tries again to send the waiting frames of every peer."""
        for peer, frames in list(self._pending.items()):
            while frames and self._try(peer, frames[0]):
                self._bytes[peer] -= len(frames.popleft())
            if not frames:
                self.forget(peer)

    def forget(self, peer: bytes) -> None:
        """Drops the frames that wait for a peer."""
        self._pending.pop(peer, None)
        self._bytes.pop(peer, None)

    def give_up(self, peer: bytes) -> None:
        """Drops a peer's waiting frames and, from now on, every further frame for that peer."""
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


class EndpointError(Exception):
    """The worker cannot listen for front ends at any of its addresses."""


class Wire:
    """The sockets of a worker process: one to the reaper (the supervisor), one for front ends (HTTP
    server processes). The sockets are made before the model is loaded; front ends can connect only
    after :meth:`listen`."""

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
        self.refusals = Refusals(_log.warning)
        self.public_key = ""
        self._zap: ZapAuthenticator | None = None
        self._peers: dict[bytes, _Peer] = {}
        """Front ends that have sent a message to this worker, by their ZeroMQ routing ids."""
        if settings.trusted:
            pair = new_pair()
            self.public_key = pair.public
            trusted = TrustList(Path(settings.trusted))
            self._zap = ZapAuthenticator(self._context, trusted, self.refusals)
            self._zap.guard(self.router, "worker", pair)
        self._listen = settings.listen
        self._incarnation = settings.incarnation

    @property
    def all_sockets(self) -> list[zmq.Socket[Any]]:
        """Sockets to poll: ``reaper``, ``router``, and the authenticator's sockets, which
        :meth:`authenticate` reads."""
        guards = self._zap.sockets if self._zap is not None else []
        return [self.reaper, self.router, *guards]

    def listen(self) -> str:
        """Lets front ends connect; returns the endpoint to announce to them: an ``ipc`` address, or
        ``tcp://*:PORT``, in which a front end puts this machine's host name.

        Raises:
            EndpointError: the address, or every port of its range, cannot be bound; or other
                machines could reach the address and the worker has no key.
        """
        try:
            if not self._listen.startswith("tcp://"):
                self.router.bind(self._listen)
                return self.router.getsockopt_string(zmq.LAST_ENDPOINT)
            host, ports = host_and_range(self._listen.removeprefix("tcp://"))
            if self._zap is None and not is_loopback(host):
                raise EndpointError(f"others can reach {host}, and this worker has no key")
            sockets.configure_tcp(self.router, host)
            return f"tcp://*:{bind_one(self.router, host, ports.beginning_with(self._incarnation))}"
        except zmq.ZMQError as error:
            raise EndpointError(f"cannot listen on {self._listen}: {error.strerror}") from error

    def authenticate(self) -> None:
        """Answers peers that want to connect, and gives up peers whose key has been revoked."""
        if self._zap is None:
            return
        revoked = self._zap.poll()
        for peer_id, peer in self._peers.items() if revoked else ():
            if peer.key in revoked:
                why = f"key {peer.key} is no longer trusted: nothing more is sent to it"
                self.refusals.refuse(peer.address, "revoked", why)
                self.outbox.give_up(peer_id)

    def send_to_reaper(self, message: ToReaper) -> None:
        """Sends a message to the reaper (the supervisor) without waiting; if the reaper does not
        read, the message is dropped."""
        try:
            self.reaper.send(codec.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            _log.warning(
                "the reaper does not read: a message to it is dropped, this worker serves on",
                message=type(message).__name__,
            )

    def send(self, peer_id: bytes, message: ToFrontEnd) -> None:
        """Sends a message to the front end with this ZeroMQ routing id."""
        self.outbox.send(peer_id, codec.encode(message))

    def take_lost_peers(self) -> list[bytes]:
        """Forgets the front ends that were given up since the last call, because they are gone,
        read too slowly or lost their key, and returns their routing ids."""
        return self._forget([peer_id for peer_id in self._peers if peer_id in self.outbox.lost])

    def take_silent_peers(self) -> list[bytes]:
        """Forgets the front ends that have sent nothing for ten seconds (PEER_TIMEOUT_S), and
        returns their routing ids."""
        before = time.monotonic() - PEER_TIMEOUT_S
        return self._forget(
            [peer_id for peer_id, peer in self._peers.items() if peer.heard_at < before]
        )

    def _forget(self, peer_ids: list[bytes]) -> list[bytes]:
        for peer_id in peer_ids:
            self.outbox.forget(peer_id)
            del self._peers[peer_id]
        return peer_ids

    def receive_from_reaper(self) -> Iterator[ToSlot]:
        """Yields the messages of the reaper (the supervisor) that have arrived, without waiting."""
        while (parts := _receive(self.reaper)) is not None:
            try:
                yield codec.to_slot.decode(parts[-1])
            except codec.BadFrame as error:
                self.refusals.refuse("the reaper", error.reason, str(error))

    def receive_from_front_ends(self) -> Iterator[tuple[bytes, ToWorker]]:
        """Yields the messages of front ends that have arrived, each with its sender's routing id,
        without waiting."""
        arrived = self._arrived() if self._zap is None else self._arrived_guarded(self._zap)
        for key, address, (peer_id, *frames) in arrived:
            if len(frames) != 1:
                why = f"{len(frames)} frames instead of one"
                self.refusals.refuse(address or peer_id.hex(), "nonsense", why)
                continue
            try:
                message = codec.to_worker.decode(frames[0])
            except codec.BadFrame as error:
                self.refusals.refuse(address or peer_id.hex(), error.reason, str(error))
                continue
            peer = self._peers.setdefault(peer_id, _Peer(0.0, key, address))
            peer.heard_at = time.monotonic()
            yield peer_id, message

    def _arrived(self) -> Iterator[tuple[str, str, list[bytes]]]:
        for _ in range(FRAMES_A_ROUND):
            if (parts := _receive(self.router)) is None:
                return
            yield "", "", parts

    def _arrived_guarded(
        self, authenticator: ZapAuthenticator
    ) -> Iterator[tuple[str, str, list[bytes]]]:
        """Yields the public key, the address and the frames of each message that has arrived from a
        peer whose key is still trusted."""
        for _ in range(FRAMES_A_ROUND):
            try:
                parts = self.router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if authenticator.admits(parts[-1]):
                key, address = user(parts[-1]), peer_address(parts[-1])
                yield key, address, [part.bytes for part in parts]

    def close(self, linger_s: float) -> None:
        """Closes the sockets. Messages that are still unsent have ``linger_s`` seconds to leave the
        process."""
        self.outbox.flush()
        if self._zap is not None:
            self._zap.close()
        for socket in (self.reaper, self.router):
            socket.setsockopt(zmq.LINGER, int(linger_s * 1000))
            socket.close()
        self._context.term()


def bind_one(router: zmq.Socket[Any], host: str, ports: Sequence[int]) -> int:
    """Binds the ROUTER to the first free one of ``ports``, and returns that port.

    Raises:
        zmq.ZMQError: no port is free, or the host is not this machine's.
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
