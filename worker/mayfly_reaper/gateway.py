"""The reaper's TCP sockets, for front ends of any machine.

A node whose state directory has a key speaks CURVE alone, to those whom it trusts. Without one it
is plain, and starts on a loopback address only. What front ends may say is little: a worker's words
and the operator's commands are never taken from a network.

::

    key revoked --> both sockets are bound anew: every connection ends, the trusted come again
"""

from __future__ import annotations

import errno
import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import zmq

from mayfly_protocol import codec, identity
from mayfly_protocol.addresses import bracketed, is_loopback
from mayfly_protocol.doorkeeper import Doorkeeper, Refusals, peer_address
from mayfly_protocol.identity import IdentityError, KeyPair, TrustList
from mayfly_protocol.roster import Ask, AskMetrics, Done, FromNode, Quarantine, ToNode
from mayfly_protocol.sockets import over_tcp
from mayfly_reaper.errors import StartError
from mayfly_reaper.exchange import Exchange
from mayfly_reaper.settings import Network
from mayfly_reaper.telling import Once

MAX_WORD_BYTES = 64 << 10
"""A front end's words are short."""
WORDS_QUEUED = 1000
REBIND_S = 2.0
"""A port is free again moments after its last listener was told to go."""

_log = logging.getLogger(__name__)


def own_pair(network: Network, state_dir: Path) -> KeyPair | None:
    """The key that a node is to use; None where it may do without.

    Raises:
        StartError: it may not, or the key, the list of the trusted or a port cannot be used.
    """
    try:
        pair = identity.read_pair(state_dir)
    except IdentityError as error:
        raise StartError(str(error)) from error
    if pair is None and not is_loopback(network.host):
        raise StartError(
            f"others can reach {network.host}, and this node has no key: {identity.HOW}, "
            "`mayfly keys trust` says who may connect"
        )
    if problem := TrustList(identity.trusted_file(state_dir)).problem:
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
        self._exchange = Exchange(poller, stack)
        control, roster = self._exchange.control, self._exchange.roster
        control.setsockopt(zmq.RCVHWM, WORDS_QUEUED)
        for each in (control, roster):
            each.setsockopt(zmq.MAXMSGSIZE, MAX_WORD_BYTES)
            over_tcp(each, network.host)
        self._trusted = TrustList(identity.trusted_file(state_dir))
        self._problem = ""
        self._keeper: Doorkeeper | None = None
        if pair is not None:
            self._keeper = Doorkeeper(self._exchange.context, self._trusted, self.refusals)
            stack.callback(self._keeper.close)
            self._keeper.guard(control, "control", pair)
            self._keeper.guard(roster, "roster", pair)
            for each in self._keeper.sockets:
                poller.register(each, zmq.POLLIN)
        self._bound = [(control, network.port), (roster, network.port + 1)]
        self._host = bracketed(network.host)
        for bound, port in self._bound:
            self._bind(bound, port)
        self._unbound: list[tuple[zmq.Socket[bytes], int]] = []
        self._unbound_at = 0.0
        self._complain = Once(note)
        note(_where(network, pair, len(self._trusted)))

    def questions(self) -> Iterator[Question]:
        """What has come in. Who knocks is answered first."""
        self._attend()
        for sender, *frames in self._exchange.words():
            if self._keeper is not None and not self._keeper.admits(frames[-1]):
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
        if self._keeper is None:
            return
        revoked = self._keeper.attend()
        if self._trusted.problem != self._problem:
            self._problem = self._trusted.problem
            if self._problem:
                self._note(f"who is trusted stays as it was: {self._problem}")
        if revoked:
            keys = ", ".join(f"{key[:8]}..." for key in sorted(revoked))
            self._note(f"{keys} may not connect any more, and is cut off")
            self._unbound_at = time.monotonic()
            self._complain = Once(self._note)
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
