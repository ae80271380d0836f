"""Everybody that the reaper talks with.

::

    workers, command line ---- ipc ---> local exchange     whatever they are entitled to say
    front ends of this machine ipc ---/
    front ends of any machine  tcp ---> gateway            questions, and what to quarantine

Both have a ZeroMQ context, and so an I/O thread, of their own: nothing that comes from a network
keeps the words of workers waiting.

Two sockets that belong together: one for words, one for rosters.

The reaper's TCP sockets, for front ends of any machine.

A node whose state directory has a key speaks CURVE alone, to those whom it trusts. Without one it
is plain, and starts on a loopback address only. What front ends may say is little: a worker's words
and the operator's commands are never taken from a network.

::

    key revoked --> both sockets are bound anew: every connection ends, the trusted come again
"""

from __future__ import annotations

import errno
import logging
import math
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from mayfly_protocol import codec
from mayfly_protocol.common.throttle import LogThrottle
from mayfly_protocol.lifecycle import ToSlot
from mayfly_protocol.roster import (
    ROSTER_TOPIC,
    Ask,
    AskMetrics,
    Done,
    FromNode,
    Quarantine,
    Roster,
    ToNode,
)
from mayfly_protocol.transport import keys
from mayfly_protocol.transport.addresses import bracketed, is_loopback
from mayfly_protocol.transport.keys import IdentityError, KeyPair, TrustList
from mayfly_protocol.transport.sockets import configure, configure_tcp
from mayfly_protocol.transport.zap import Refusals, ZapAuthenticator, peer_address
from mayfly_reaper.paths import Runtime, StartError
from mayfly_reaper.settings import Network, NodeSettings

ROSTERS_QUEUED = 16
"""For a subscriber that does not read: each roster is the full picture."""

FRAMES_A_ROUND = 1000
"""So that no flood of words keeps the reaper from looking at the clock."""

_log = logging.getLogger(__name__)


class SocketPair:
    """A ROUTER and an XPUB that are not bound yet; closed with the stack."""

    def __init__(self, poller: zmq.Poller, stack: ExitStack) -> None:
        self.context: zmq.Context[Any] = stack.enter_context(zmq.Context())
        self.control = stack.enter_context(self.context.socket(zmq.ROUTER))
        configure(self.control)
        self.roster = stack.enter_context(self.context.socket(zmq.XPUB))
        configure(self.roster)
        self.roster.setsockopt(zmq.SNDHWM, ROSTERS_QUEUED)
        # Tell of every subscriber, not of the first to a topic: each is sent a roster at once.
        self.roster.setsockopt(zmq.XPUB_VERBOSE, 1)
        for each in (self.control, self.roster):
            poller.register(each, zmq.POLLIN)

    def words(self) -> Iterator[list[zmq.Frame]]:
        """What has come in: who said it, and its frames."""
        for _ in range(FRAMES_A_ROUND):
            try:
                yield self.control.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return

    def subscribed(self) -> bool:
        """Whether somebody has begun to listen to the rosters since."""
        found = False
        for _ in range(FRAMES_A_ROUND):
            if not self.roster.poll(0):
                break
            found = self.roster.recv().startswith(b"\x01") or found
        return found

    def send(self, identity: bytes, message: ToSlot | FromNode) -> None:
        try:
            self.control.send_multipart([identity, codec.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:  # it went away, or does not read
            _log.warning("%r does not hear us: %s", identity[:64], error)

    def publish(self, frame: bytes) -> None:
        """Never blocks: an XPUB drops."""
        self.roster.send_multipart([ROSTER_TOPIC, frame])


MAX_WORD_BYTES = 64 << 10
"""A front end's words are short."""
WORDS_QUEUED = 1000
REBIND_S = 2.0
"""A port is free again moments after its last listener was told to go."""


def own_pair(network: Network, state_dir: Path) -> KeyPair | None:
    """The key that a node is to use; None where it may do without.

    Raises:
        StartError: it may not, or the key, the list of the trusted or a port cannot be used.
    """
    try:
        pair = keys.read_pair(state_dir)
    except IdentityError as error:
        raise StartError(str(error)) from error
    if pair is None and not is_loopback(network.host):
        raise StartError(
            f"others can reach {network.host}, and this node has no key: {keys.HOW}, "
            "`mayfly keys trust` says who may connect"
        )
    if problem := TrustList(keys.trusted_file(state_dir)).problem:
        raise StartError(problem)
    ports = network.worker_ports
    if any(ports.first <= port <= ports.last for port in (network.port, network.port + 1)):
        raise StartError(
            f"the ports {network.port} and {network.port + 1} are the node's own, and cannot be "
            f"among its workers' ({ports}): choose others with --worker-ports"
        )
    return pair


@dataclass(frozen=True, slots=True)
class Question:
    """What a front end said, and how to answer it."""

    message: ToNode
    answer: Callable[[FromNode], None]


class Gateway:
    """Bound at once; closed with the stack.

    Args:
        note: is told what the operator should know.

    Raises:
        StartError: as :func:`own_pair`, or an address cannot be bound.
    """

    def __init__(
        self,
        network: Network,
        state_dir: Path,
        poller: zmq.Poller,
        stack: ExitStack,
        note: Callable[[str], None],
    ) -> None:
        pair = own_pair(network, state_dir)
        self.refusals = Refusals(_log.warning)
        self._note = note
        self._exchange = SocketPair(poller, stack)
        control, roster = self._exchange.control, self._exchange.roster
        control.setsockopt(zmq.RCVHWM, WORDS_QUEUED)
        for each in (control, roster):
            each.setsockopt(zmq.MAXMSGSIZE, MAX_WORD_BYTES)
            configure_tcp(each, network.host)
        self._trusted = TrustList(keys.trusted_file(state_dir))
        self._problem = ""
        self._zap: ZapAuthenticator | None = None
        if pair is not None:
            self._zap = ZapAuthenticator(self._exchange.context, self._trusted, self.refusals)
            stack.callback(self._zap.close)
            self._zap.guard(control, "control", pair)
            self._zap.guard(roster, "roster", pair)
            for each in self._zap.sockets:
                poller.register(each, zmq.POLLIN)
        self._bound = [(control, network.port), (roster, network.port + 1)]
        self._host = bracketed(network.host)
        for bound, port in self._bound:
            self._bind(bound, port)
        self._unbound: list[tuple[zmq.Socket[bytes], int]] = []
        self._unbound_at = 0.0
        self._complain = LogThrottle(note, quiet_s=math.inf)
        note(_where(network, pair, len(self._trusted)))

    def questions(self) -> Iterator[Question]:
        """What has come in. Who knocks is answered first."""
        self._attend()
        for sender, *frames in self._exchange.words():
            if self._zap is not None and not self._zap.admits(frames[-1]):
                continue
            try:
                message = codec.to_node.decode(_only(frames))
            except codec.BadFrame as error:
                self.refusals.refuse(peer_address(frames[-1]), error.reason, str(error))
                continue
            peer = sender.bytes
            if isinstance(message, Ask | AskMetrics | Quarantine):
                yield Question(message, lambda told, peer=peer: self._exchange.send(peer, told))  # type: ignore[misc]
            else:
                name = type(message).__name__
                self.refusals.refuse(peer_address(frames[-1]), "nonsense", f"sent {name}")
                self._exchange.send(peer, Done(False, f"{name} is a matter of the node's machine"))

    def subscribed(self) -> bool:
        return self._exchange.subscribed()

    def publish(self, frame: bytes) -> None:
        self._exchange.publish(frame)

    def _attend(self) -> None:
        if self._zap is None:
            return
        revoked = self._zap.poll()
        if self._trusted.problem != self._problem:
            self._problem = self._trusted.problem
            if self._problem:
                self._note(f"who is trusted stays as it was: {self._problem}")
        if revoked:
            keys = ", ".join(f"{key[:8]}..." for key in sorted(revoked))
            self._note(f"{keys} may not connect any more, and is cut off")
            self._unbound_at = time.monotonic()
            self._complain = LogThrottle(self._note, quiet_s=math.inf)
            for bound in self._bound:
                if bound not in self._unbound:
                    bound[0].unbind(bound[0].getsockopt_string(zmq.LAST_ENDPOINT))
                    self._unbound.append(bound)
        for again in list(self._unbound):
            try:
                self._bind(*again)
            except StartError as error:  # again at the next look
                if time.monotonic() - self._unbound_at > REBIND_S:
                    self._complain(f"no front end reaches this node: {error}")
                return
            self._unbound.remove(again)

    def _bind(self, unbound: zmq.Socket[bytes], port: int) -> None:
        try:
            unbound.bind(f"tcp://{self._host}:{port}")
        except zmq.ZMQError as error:
            hint = "--control-host" if error.errno == errno.EADDRNOTAVAIL else "--control-port"
            raise StartError(
                f"cannot listen on {self._host} port {port}: {error.strerror}; choose another one "
                f"with {hint}"
            ) from error


def _where(network: Network, pair: KeyPair | None, trusted: int) -> str:
    if pair is None:
        place = f"{bracketed(network.host)}:{network.port}"
        return f"front ends of this machine reach this node at tcp://{place}, without keys"
    host = network.host if network.host not in ("0.0.0.0", "::") else socket.gethostname()  # noqa: S104
    who = "1 key is trusted" if trusted == 1 else f"{trusted} keys are trusted"
    who = who if trusted else "no key is trusted yet: `mayfly keys trust NAME KEY`"
    place = f"{bracketed(host)}:{network.port}"
    return f"front ends reach this node at tcp://{pair.public}@{place}; {who}"


def _only(frames: list[zmq.Frame]) -> bytes:
    if len(frames) != 1:
        raise codec.BadFrame(f"a message is one frame, not {len(frames)}")
    return frames[0].bytes


class ControlSockets:
    """Bound at once; closed with the stack. Raises StartError where the gateway cannot be."""

    def __init__(
        self,
        settings: NodeSettings,
        runtime: Runtime,
        poller: zmq.Poller,
        stack: ExitStack,
        note: Callable[[str], None],
    ) -> None:
        self._local = SocketPair(poller, stack)
        self._local.control.bind(runtime.control)
        self._local.roster.bind(runtime.roster)
        self._gateway: Gateway | None = None
        if settings.network is not None:
            self._gateway = Gateway(settings.network, settings.state_dir, poller, stack, note)

    @property
    def refused(self) -> Mapping[str, int]:
        """How often front ends were refused something, by reason; grows."""
        return self._gateway.refusals.counts if self._gateway is not None else {}

    def words(self) -> Iterator[tuple[bytes, list[bytes]]]:
        """What has come in on this machine: who said it, and its frames."""
        for identity, *frames in self._local.words():
            yield identity.bytes, [frame.bytes for frame in frames]

    def questions(self) -> Iterator[Question]:
        """What front ends have sent over the network."""
        if self._gateway is not None:
            yield from self._gateway.questions()

    def subscribed(self) -> bool:
        """Whether somebody has begun to listen to the rosters since."""
        beyond = self._gateway is not None and self._gateway.subscribed()
        return self._local.subscribed() or beyond

    def tell_worker(self, slot: str, incarnation: int, message: ToSlot) -> None:
        self._local.send(f"{slot}#{incarnation}".encode(), message)

    def reply(self, identity: bytes, message: FromNode) -> None:
        self._local.send(identity, message)

    def publish(self, roster: Roster) -> None:
        frame = codec.encode(roster)
        self._local.publish(frame)
        if self._gateway is not None:
            self._gateway.publish(frame)
