"""Who gets into a process's TCP sockets.

::

    peer                     ZeroMQ                      doorkeeper
    connects --------------> ACCEPTED ------------------>  pending, with its address
    CURVE handshake -------> ZAP: this key? ------------>  trusted: 200     else: 400, refused
    NULL, garbage, silence   cut: DISCONNECTED --------->  still pending: refused
    message ---------------> with the key as User-Id --->  trusted still?   else: dropped, refused

Keys are asked for once a connection, by ZAP (ZeroMQ RFC 27), so that a key which is revoked later
has to be looked for in every message. A doorkeeper lives on its sockets' own thread: who polls them
polls :attr:`Doorkeeper.sockets` too, and calls :meth:`Doorkeeper.attend` about once a second at
least. Until that answers a peer, the peer waits.
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

from mayfly_protocol.transport.keys import KeyPair, TrustList
from mayfly_protocol.transport.sockets import serve_curve

Reason = Literal["untrusted", "handshake", "revoked", "nonsense", "version"]
"""Why a peer was refused: its key is not trusted; it spoke another mechanism, was after another
server, or came to nothing; its key was revoked while it was connected; its frame was no message; or
one of another major version of the protocol."""

LOOK_INTERVAL_S = 1.0
QUIET_S = 60.0
"""One and the same complaint is not logged more often."""
_REMEMBERED = 1000
"""Complaints, and connections of unknown purpose, that are remembered."""
_A_ROUND = 200
"""What is looked at before it is somebody else's turn."""
_UNKNOWN = "an unknown address"


class Seldom:
    """Says each thing about somebody at once, and again only after a while, with how often it
    happened meanwhile. Times are seconds of ``clock``."""

    def __init__(
        self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._say = say
        self._clock = clock
        self._said: dict[tuple[str, str], tuple[float, int]] = {}
        self._forgot_at = clock()

    def __call__(self, who: str, what: str, detail: str = "") -> None:
        """``who`` and ``what`` decide whether it has been said; ``detail`` is only said along."""
        now = self._clock()
        said_at, unsaid = self._said.get((who, what), (-QUIET_S, 0))
        if now - said_at < QUIET_S:
            self._said[who, what] = (said_at, unsaid + 1)
            return
        if len(self._said) >= _REMEMBERED and now - self._forgot_at >= 1.0:
            self._forgot_at = now
            self._said = {key: old for key, old in self._said.items() if now - old[0] < QUIET_S}
        if len(self._said) >= _REMEMBERED:
            return  # a flood from everywhere: it is counted, and fills no disk
        self._said[who, what] = (now, 0)
        again = f" ({unsaid} more times since it was last said)" if unsaid else ""
        self._say(f"{who}: {what}{': ' if detail else ''}{detail}{again}")


class Refusals:
    """Who was refused something and why: counted always, said seldom. ``counts`` are by reason, and
    grow as long as the process lives."""

    def __init__(
        self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._say = Seldom(say, clock)

    def refuse(self, who: str, reason: Reason, detail: str) -> None:
        """``who`` is an address, or whatever tells peers apart."""
        self.counts[reason] += 1
        self._say(who, f"refused, {reason}", detail)


class Doorkeeper:
    """Has to be made before any of the sockets is bound: without somebody who answers ZAP's
    questions ZeroMQ would let everybody in.

    Args:
        context: the sockets' own; one doorkeeper serves all of it.
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
        self._look_at = clock()
        self._revoked: frozenset[str] = frozenset()
        self._zap: zmq.Socket[bytes] = context.socket(zmq.REP)
        self._zap.setsockopt(zmq.LINGER, 0)
        self._zap.bind("inproc://zeromq.zap.01")
        self._doors: dict[str, _Door] = {}

    @property
    def sockets(self) -> list[zmq.Socket[Any]]:
        """What to poll, beside the guarded sockets."""
        return [self._zap, *(door.monitor for door in self._doors.values())]

    def guard(self, guarded: zmq.Socket[Any], name: str, own: KeyPair) -> None:
        """Has a socket that is not bound yet take none but trusted peers. ``name`` is what the log
        calls it."""
        serve_curve(guarded, own, domain=name)
        self._doors[name] = _Door(guarded)

    def attend(self) -> frozenset[str]:
        """Answers who knocked and counts who went away again.

        Returns:
            Keys that were revoked since the last time.
        """
        self._look()
        for name, door in self._doors.items():
            for address in door.refused():
                self._refusals.refuse(address, "handshake", f"came to nothing at the {name} socket")
        for _ in range(_A_ROUND):
            if not self._zap.poll(0):
                break
            self._zap.send_multipart(self._answer(self._zap.recv_multipart()))
        revoked, self._revoked = self._revoked, frozenset()
        return revoked

    def _look(self) -> None:
        now = self._clock()
        if now >= self._look_at:
            self._look_at = now + LOOK_INTERVAL_S
            self._revoked |= self._trusted.look()

    def admits(self, frame: zmq.Frame) -> bool:
        """Whether a message's sender, at a guarded socket, is trusted still."""
        key = user(frame)
        if key in self._trusted:
            return True
        self._refusals.refuse(peer_address(frame), "revoked", f"key {self._trusted.name(key)}")
        return False

    def close(self) -> None:
        for door in self._doors.values():
            door.close()
        self._zap.close(0)

    def _answer(self, request: Sequence[bytes]) -> list[bytes]:
        """To ZAP's [version, id, domain, address, identity, mechanism, key]."""
        version, number, domain, address, _, mechanism, *credentials = request
        name, who = domain.decode(), plain_address(address.decode())
        key = credentials[0].hex() if mechanism == b"CURVE" and credentials else ""
        door = self._doors.get(name)
        if door is not None:
            door.known(who)
        if key not in self._trusted:
            self._revoked |= self._trusted.look()  # it may just have become so
        if key in self._trusted:
            return [version, number, b"200", b"OK", key.encode(), b""]
        detail = f"key {key} at the {name} socket; `mayfly keys trust NAME KEY` would let it in"
        self._refusals.refuse(who, "untrusted", detail)
        return [version, number, b"400", b"this key is not trusted here", b"", b""]


class _Door:
    """The connections of one socket for which no key has been asked yet, by file descriptor."""

    def __init__(self, guarded: zmq.Socket[Any]) -> None:
        self._guarded = guarded
        self.monitor: zmq.Socket[Any] = guarded.get_monitor_socket(
            zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
        )
        self._pending: dict[int, str] = {}

    def refused(self) -> list[str]:
        """Addresses of those that went away, or were cut, before they had shown a key."""
        gone = []
        for _ in range(_A_ROUND):
            if not self.monitor.poll(0):
                break
            event = parse_monitor_message(self.monitor.recv_multipart())
            descriptor = int(event["value"])
            if event["event"] == zmq.EVENT_DISCONNECTED:
                if descriptor in self._pending:
                    gone.append(self._pending.pop(descriptor))
            elif len(self._pending) < _REMEMBERED:
                self._pending[descriptor] = _address_of(descriptor)
        return gone

    def known(self, address: str) -> None:
        """A peer from this address has shown its key: the one that came first, by all that can be
        told."""
        for descriptor, pending in self._pending.items():
            if pending in (address, _UNKNOWN):
                del self._pending[descriptor]
                return

    def close(self) -> None:
        if not self._guarded.closed:
            self._guarded.disable_monitor()
        self.monitor.close(0)


def user(frame: zmq.Frame) -> str:
    """The public key with which a message's connection was made; empty without CURVE."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""


def peer_address(frame: zmq.Frame) -> str:
    """The address that a message came from; empty on ipc."""
    try:
        return plain_address(str(frame.get("Peer-Address")))
    except zmq.ZMQError:
        return ""


def plain_address(address: str) -> str:
    """An IPv4 address as such, also where an IPv6 socket has received it."""
    return address.removeprefix("::ffff:")


def _address_of(descriptor: int) -> str:
    """The other end of a connection that ZeroMQ owns, if it is still there: one that began with
    nonsense has been cut by now."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            return plain_address(str(connection.getpeername()[0]))
    except (OSError, IndexError):
        return _UNKNOWN
