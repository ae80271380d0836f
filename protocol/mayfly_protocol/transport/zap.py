"""Authentication of the peers at a process's TCP sockets.

::

    peer                     ZeroMQ                      ZapAuthenticator
    connects --------------> ACCEPTED ------------------>  pending, with its address
    CURVE handshake -------> ZAP: this key? ------------>  trusted: 200     else: 400, refused
    NULL, garbage, silence   cut: DISCONNECTED --------->  still pending: refused
    message ---------------> with the key as User-Id --->  still trusted?   else: dropped, refused

ZeroMQ asks about a peer's key once per connection, by ZAP (ZeroMQ RFC 27), so every message has to
be checked for a key that was revoked later. An authenticator belongs to the thread of the guarded
sockets: this thread also polls :attr:`ZapAuthenticator.sockets`, and calls
:meth:`ZapAuthenticator.poll` at least about once a second. A peer waits until this method answers.
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
mechanism, another server's key, or no handshake at all); its key was revoked while it was
connected; its frame was no message; or its frame was of another major version of the protocol."""

RELOAD_INTERVAL_S = 1.0
PENDING_MAX = 1000
"""Largest number of connections without a verified key that are remembered for each socket, to be
counted as refused if they end without showing a key."""
EVENTS_PER_POLL = 200
"""Largest number of connection events of one socket, and of ZeroMQ's questions about keys, that one
call of :meth:`ZapAuthenticator.poll` handles."""
UNKNOWN_ADDRESS = "an unknown address"


class Refusals:
    """Counts and logs refused connections and messages. ``counts`` holds their numbers by reason
    since the process's start; refusals of one peer for one reason are logged at most once a
    minute."""

    def __init__(
        self, log: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._log = LogThrottle(log, clock)

    def refuse(self, peer: str, reason: Reason, detail: str) -> None:
        """Counts and logs the refusal of a connection or a message. ``peer`` is the peer's address,
        its routing id in hex, or another text that identifies the peer."""
        self.counts[reason] += 1
        self._log(f"refused a connection or message of {peer} ({reason})", detail)


class ZapAuthenticator:
    """Answers the questions that ZeroMQ asks by ZAP, its authentication protocol: may a peer with
    this key connect to a socket of one context?

    It has to be made before any of the sockets is bound: without a ZAP server, ZeroMQ lets every
    peer in.

    Args:
        context: the ZeroMQ context of the guarded sockets; a context takes one authenticator.
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
        """Sockets of the authenticator, which the caller polls beside the guarded sockets:
        :meth:`poll` has to be called when one of them is readable."""
        return [self._zap, *(each.monitor for each in self._guarded.values())]

    def guard(self, socket_: zmq.Socket[Any], name: str, own: KeyPair) -> None:
        """Lets only trusted peers connect to a socket, which must not be bound yet. ``name`` is the
        socket's name in the log."""
        serve_curve(socket_, own, domain=name)
        self._guarded[name] = _GuardedSocket(socket_)

    def poll(self) -> frozenset[str]:
        """Answers ZAP requests and counts connections that ended before the peer showed a key.

        Returns:
            Keys revoked since the last call.
        """
        self._reload()
        for name, guarded in self._guarded.items():
            for address in guarded.failed_handshakes():
                why = f"it ended without a CURVE handshake at the {name} socket"
                self._refusals.refuse(address, "handshake", why)
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
        """Returns True if the sender of a message at a guarded socket is still trusted; otherwise
        counts a refusal and returns False."""
        key = user(frame)
        if key in self._trusted:
            return True
        why = f"key {self._trusted.name(key)} is no longer trusted"
        self._refusals.refuse(peer_address(frame), "revoked", why)
        return False

    def close(self) -> None:
        for guarded in self._guarded.values():
            guarded.close()
        self._zap.close(0)

    def _answer(self, request: Sequence[bytes]) -> list[bytes]:
        """Returns the reply to a ZAP request [version, id, domain, address, identity, mechanism,
        key]."""
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
    """A socket that takes trusted peers only, with the addresses of its connections that have not
    shown a key yet, by file descriptor."""

    def __init__(self, socket_: zmq.Socket[Any]) -> None:
        self._socket = socket_
        self.monitor: zmq.Socket[Any] = socket_.get_monitor_socket(
            zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
        )
        self._pending: dict[int, str] = {}

    def failed_handshakes(self) -> list[str]:
        """Returns the addresses of connections that, since the last call, ended or were cut before
        they had shown a key."""
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
        """Notes that a connection from ``address`` has shown its key. If several connections from
        there have not shown one yet, the oldest of them is taken: ZAP does not tell connections
        from one address apart."""
        for descriptor, pending in self._pending.items():
            if pending in (address, UNKNOWN_ADDRESS):
                del self._pending[descriptor]
                return

    def close(self) -> None:
        if not self._socket.closed:
            self._socket.disable_monitor()
        self.monitor.close(0)


def user(frame: zmq.Frame) -> str:
    """Returns the public key of the peer that sent a message; empty on a socket without CURVE."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""


def peer_address(frame: zmq.Frame) -> str:
    """Returns the IP address that a message came from; empty for a message over ipc."""
    try:
        return plain_address(str(frame.get("Peer-Address")))
    except zmq.ZMQError:
        return ""


def plain_address(address: str) -> str:
    """Removes the prefix ``::ffff:`` that an IPv6 socket puts before the address of an IPv4
    peer."""
    return address.removeprefix("::ffff:")


def _address_of(descriptor: int) -> str:
    """Returns the address of the peer at a connection of ZeroMQ, given by its file descriptor; a
    text for an unknown address if ZeroMQ has already cut the connection, which it does after bytes
    that are no handshake."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            return plain_address(str(connection.getpeername()[0]))
    except (OSError, IndexError):
        return UNKNOWN_ADDRESS
