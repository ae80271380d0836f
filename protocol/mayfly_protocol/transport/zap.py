"""Authentication of the peers at a process's TCP sockets.

::

    peer                     ZeroMQ                      ZapAuthenticator
    connects --------------> ACCEPTED ------------------>  pending, with its address
    CURVE handshake -------> ZAP: this key? ------------>  trusted: 200     else: 400, refused
    NULL, garbage, silence   cut: DISCONNECTED --------->  still pending: refused
    message ---------------> with the key as User-Id --->  still trusted?   else: dropped, refused

ZeroMQ asks for a key once a connection, by ZAP (ZeroMQ RFC 27), so that every message has to be
checked for a key that was revoked later. An authenticator belongs to the thread of its sockets:
whoever polls them polls :attr:`ZapAuthenticator.sockets`, too, and calls
:meth:`ZapAuthenticator.poll` at least about once a second. Until that answers a peer, the peer
waits.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

import zmq
from zmq.utils.monitor import parse_monitor_message

from mayfly_protocol.common.throttle import LogThrottle
from mayfly_protocol.transport.keys import KeyPair, TrustList
from mayfly_protocol.transport.sockets import serve_curve

Reason = Literal["untrusted", "handshake", "revoked", "nonsense", "version"]
"""Reason for which a peer is refused: its key is not trusted; its handshake failed (another
mechanism, another server's key, or none at all); its key was revoked while it was connected; its
frame was no message; or its frame was of another major version of the protocol."""

RELOAD_INTERVAL_S = 1.0
PENDING_MAX = 1000
"""Connections without a key that are remembered for each socket."""
EVENTS_PER_POLL = 200
"""Events of one socket, and questions about keys, that one poll handles at most."""
UNKNOWN_ADDRESS = "an unknown address"


class Refusals:
    """Counts of the peers refused, by reason, each also logged, but seldom. ``counts`` grow as
    long as the process lives."""

    def __init__(
        self, log: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._log = LogThrottle(log, clock)

    def refuse(self, peer: str, reason: Reason, detail: str) -> None:
        """Counts and logs a refusal. ``peer`` is an address, or whatever identifies the peer."""
        self.counts[reason] += 1
        self._log(f"{peer}: refused, {reason}", detail)


class ZapAuthenticator:
    """Server of the ZAP requests of one ZeroMQ context.

    It has to be made before any of the sockets is bound: without a ZAP server, ZeroMQ lets every
    peer in.

    Args:
        context: the context of the guarded sockets; it takes one authenticator.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        trusted: TrustList,
        refusals: Refusals,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._trusted = trusted
        self._refusals = refusals
        self._clock = clock
        self._reload_at = clock()
        self._revoked: frozenset[str] = frozenset()
        self._zap: zmq.Socket[bytes] = context.socket(zmq.REP)
        self._zap.setsockopt(zmq.LINGER, 0)
        self._zap.bind("inproc://zeromq.zap.01")
        self._guarded: dict[str, _GuardedSocket] = {}

    @property
    def sockets(self) -> list[zmq.Socket[Any]]:
        """Sockets to poll beside the guarded ones."""
        return [self._zap, *(each.monitor for each in self._guarded.values())]

    def guard(self, socket_: zmq.Socket[Any], name: str, own: KeyPair) -> None:
        """Lets none but trusted peers connect to a socket that is not bound yet. ``name`` is the
        socket's name in the log."""
        serve_curve(socket_, own, domain=name)
        self._guarded[name] = _GuardedSocket(socket_)

    def poll(self) -> frozenset[str]:
        """Answers ZAP requests and counts connections that ended without a key.

        Returns:
            Keys revoked since the last call.
        """
        self._reload()
        for name, guarded in self._guarded.items():
            for address in guarded.failed_handshakes():
                self._refusals.refuse(address, "handshake", f"came to nothing at the {name} socket")
        for _ in range(EVENTS_PER_POLL):
            if not self._zap.poll(0):
                break
            self._zap.send_multipart(self._answer(self._zap.recv_multipart()))
        revoked, self._revoked = self._revoked, frozenset()
        return revoked

    def _reload(self) -> None:
        now = self._clock()
        if now >= self._reload_at:
            self._reload_at = now + RELOAD_INTERVAL_S
            self._revoked |= self._trusted.reload()

    def admits(self, frame: zmq.Frame) -> bool:
        """Returns True if the sender of a message at a guarded socket is still trusted; counts a
        refusal otherwise."""
        key = user(frame)
        if key in self._trusted:
            return True
        self._refusals.refuse(peer_address(frame), "revoked", f"key {self._trusted.name(key)}")
        return False

    def close(self) -> None:
        for guarded in self._guarded.values():
            guarded.close()
        self._zap.close(0)

    def _answer(self, request: Sequence[bytes]) -> list[bytes]:
        """Replies to ZAP's [version, id, domain, address, identity, mechanism, key]."""
        version, number, domain, address, _, mechanism, *credentials = request
        name, peer = domain.decode(), plain_address(address.decode())
        key = credentials[0].hex() if mechanism == b"CURVE" and credentials else ""
        guarded = self._guarded.get(name)
        if guarded is not None:
            guarded.key_shown(peer)
        if key not in self._trusted:
            self._revoked |= self._trusted.reload()  # the key may have been added just now
        if key in self._trusted:
            return [version, number, b"200", b"OK", key.encode(), b""]
        detail = f"key {key} at the {name} socket; `mayfly keys trust NAME KEY` would let it in"
        self._refusals.refuse(peer, "untrusted", detail)
        return [version, number, b"400", b"this key is not trusted here", b"", b""]


class _GuardedSocket:
    """A guarded socket and its connections that have not shown a key yet, by file descriptor."""

    def __init__(self, socket_: zmq.Socket[Any]) -> None:
        self._socket = socket_
        self.monitor: zmq.Socket[Any] = socket_.get_monitor_socket(
            zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
        )
        self._pending: dict[int, str] = {}

    def failed_handshakes(self) -> list[str]:
        """Returns the addresses of connections that ended, or were cut, without a key."""
        gone = []
        for _ in range(EVENTS_PER_POLL):
            if not self.monitor.poll(0):
                break
            event = parse_monitor_message(self.monitor.recv_multipart())
            descriptor = int(event["value"])
            if event["event"] == zmq.EVENT_DISCONNECTED:
                if descriptor in self._pending:
                    gone.append(self._pending.pop(descriptor))
            elif len(self._pending) < PENDING_MAX:
                self._pending[descriptor] = _address_of(descriptor)
        return gone

    def key_shown(self, address: str) -> None:
        """Takes one connection from an address, the oldest, off the pending ones: ZAP does not
        tell several from one address apart."""
        for descriptor, pending in self._pending.items():
            if pending in (address, UNKNOWN_ADDRESS):
                del self._pending[descriptor]
                return

    def close(self) -> None:
        if not self._socket.closed:
            self._socket.disable_monitor()
        self.monitor.close(0)


def user(frame: zmq.Frame) -> str:
    """Returns the public key of the peer that sent a message; empty without CURVE."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""


def peer_address(frame: zmq.Frame) -> str:
    """Returns the address that a message came from; empty on ipc."""
    try:
        return plain_address(str(frame.get("Peer-Address")))
    except zmq.ZMQError:
        return ""


def plain_address(address: str) -> str:
    """Removes the IPv6 prefix of an IPv4 address that an IPv6 socket has received."""
    return address.removeprefix("::ffff:")


def _address_of(descriptor: int) -> str:
    """Returns the peer's address of a connection that ZeroMQ owns. It is unknown if ZeroMQ has
    already cut the connection, as it does after bytes that are no handshake."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            return plain_address(str(connection.getpeername()[0]))
    except (OSError, IndexError):
        return UNKNOWN_ADDRESS
