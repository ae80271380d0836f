"""Sockets of the reaper: messages of workers, front ends and the command line, and the rosters.

::

    workers, command line ---- ipc ---> local sockets      all messages
    front ends of this machine ipc ---/
    front ends of any machine  tcp ---> gateway            questions, and requests for quarantine

The local sockets and the gateway each have a ZeroMQ context, and so an I/O thread, of their own:
network traffic never delays the messages of workers.

The gateway of a node whose state directory has a key speaks CURVE alone, with trusted keys only.
Without a key the gateway is not encrypted, and starts on a loopback address only. Front ends may
send little through the gateway: the messages of workers and the operator's commands are never taken
from a network.

::

    key revoked --> both TCP sockets are bound anew: all connections end, trusted peers reconnect
"""

from __future__ import annotations

import errno
import functools
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
"""Largest number of rosters queued for a subscriber that does not read; each roster is the full
state of the node."""
FRAMES_A_ROUND = 1000
"""Largest number of messages that are read from a socket at once, so that a flood of messages does
not keep the reaper from its timers."""
MAX_REQUEST_BYTES = 64 << 10
"""Largest size of a front end's message, in bytes."""
REQUESTS_QUEUED = 1000
REBIND_S = 2.0
"""Seconds for which a failure to bind a port again is normal: the port becomes free only moments
after it was unbound."""

_log = logging.getLogger(__name__)


class SocketPair:
    """A ROUTER socket for messages to the reaper and an XPUB socket for its rosters (the node's
    state). They are not bound yet, and are closed when ``stack`` is."""

    def __init__(self, poller: zmq.Poller, stack: ExitStack) -> None:
        self.context: zmq.Context[Any] = stack.enter_context(zmq.Context())
        self.control = stack.enter_context(self.context.socket(zmq.ROUTER))
        configure(self.control)
        self.roster = stack.enter_context(self.context.socket(zmq.XPUB))
        configure(self.roster)
        self.roster.setsockopt(zmq.SNDHWM, ROSTERS_QUEUED)
        # Report every subscriber, not the first to a topic: each is sent a roster at once.
        self.roster.setsockopt(zmq.XPUB_VERBOSE, 1)
        for each in (self.control, self.roster):
            poller.register(each, zmq.POLLIN)

    def receive(self) -> Iterator[list[zmq.Frame]]:
        """Yields the messages that have come in, each as the sender's identity and the message's
        frames."""
        for _ in range(FRAMES_A_ROUND):
            try:
                yield self.control.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return

    def has_new_subscriber(self) -> bool:
        """Returns True if a front end has subscribed to the rosters since the last call."""
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
            _log.warning("dropped a message to peer %r: %s", identity[:64], error)

    def publish(self, frame: bytes) -> None:
        """Publishes an encoded roster (the node's state) to its subscribers, the front ends. Never
        blocks: the XPUB socket drops rosters for subscribers that do not read."""
        self.roster.send_multipart([ROSTER_TOPIC, frame])


def own_pair(network: Network, state_dir: Path) -> KeyPair | None:
    """Returns the key pair that a node uses for connections over the network; None if only this
    machine can reach its address, so that it needs no key.

    Raises:
        StartError: the node needs a key and has none; or the key, the file of trusted keys or a
            port cannot be used.
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
class NetworkRequest:
    """A front end's message that came over the network, and the function that sends the answer."""

    message: ToNode
    answer: Callable[[FromNode], None]


class Gateway(SocketPair):
    """TCP sockets at which front ends of any machine reach the reaper. The sockets are bound at
    once, and closed when ``stack`` is.

    Args:
        note: is called with sentences for the operator.

    Raises:
        StartError: the node needs a key and has none; or the key, the file of trusted keys, a port
            or an address cannot be used.
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
        super().__init__(poller, stack)
        self.refusals = Refusals(_log.warning)
        self._note = note
        self.control.setsockopt(zmq.RCVHWM, REQUESTS_QUEUED)
        for each in (self.control, self.roster):
            each.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
            configure_tcp(each, network.host)
        self._trusted = TrustList(keys.trusted_file(state_dir))
        self._problem = ""
        self._zap: ZapAuthenticator | None = None
        if pair is not None:
            self._zap = ZapAuthenticator(self.context, self._trusted, self.refusals)
            stack.callback(self._zap.close)
            self._zap.guard(self.control, "control", pair)
            self._zap.guard(self.roster, "roster", pair)
            for each in self._zap.sockets:
                poller.register(each, zmq.POLLIN)
        self._host = bracketed(network.host)
        self._bound = [(self.control, network.port), (self.roster, network.port + 1)]
        for bound, port in self._bound:
            self._bind(bound, port)
        self._unbound: list[tuple[zmq.Socket[bytes], int]] = []
        self._unbound_at = 0.0
        self._note_once = LogThrottle(note, quiet_s=math.inf)
        note(_reachable_at(network, pair, len(self._trusted)))

    def requests(self) -> Iterator[NetworkRequest]:
        """Yields the front ends' requests that have come in, after handling changes of the trusted
        keys and new connections."""
        if self._zap is not None:
            self._poll_zap(self._zap)
        for sender, *frames in self.receive():
            if self._zap is not None and not self._zap.admits(frames[-1]):
                continue
            try:
                if len(frames) != 1:
                    raise codec.BadFrame(f"a message is one frame, not {len(frames)}")
                message = codec.to_node.decode(frames[0].bytes)
            except codec.BadFrame as error:
                self.refusals.refuse(peer_address(frames[-1]), error.reason, str(error))
                continue
            peer = sender.bytes
            if isinstance(message, Ask | AskMetrics | Quarantine):
                yield NetworkRequest(message, functools.partial(self.send, peer))
            else:
                name = type(message).__name__
                why = f"{name} is not accepted over the network"
                self.refusals.refuse(peer_address(frames[-1]), "nonsense", why)
                self.send(peer, Done(False, f"{name} is accepted from the node's machine only"))

    def _poll_zap(self, zap: ZapAuthenticator) -> None:
        revoked = zap.poll()
        if self._trusted.problem != self._problem:
            self._problem = self._trusted.problem
            if self._problem:
                self._note(f"the trusted keys stay as they were: {self._problem}")
        if revoked:
            shown = ", ".join(f"{key[:8]}..." for key in sorted(revoked))
            self._note(f"front ends with the revoked keys {shown} are disconnected")
            self._unbound_at = time.monotonic()
            self._note_once = LogThrottle(self._note, quiet_s=math.inf)
            for bound in self._bound:
                if bound not in self._unbound:
                    bound[0].unbind(bound[0].getsockopt_string(zmq.LAST_ENDPOINT))
                    self._unbound.append(bound)
        for each in list(self._unbound):
            try:
                self._bind(*each)
            except StartError as error:  # tried again at the next poll
                if time.monotonic() - self._unbound_at > REBIND_S:
                    self._note_once(f"no front end reaches this node: {error}")
                return
            self._unbound.remove(each)

    def _bind(self, unbound: zmq.Socket[bytes], port: int) -> None:
        try:
            unbound.bind(f"tcp://{self._host}:{port}")
        except zmq.ZMQError as error:
            hint = "--control-host" if error.errno == errno.EADDRNOTAVAIL else "--control-port"
            raise StartError(
                f"cannot listen on {self._host} port {port}: {error.strerror}; choose another one "
                f"with {hint}"
            ) from error


def _reachable_at(network: Network, pair: KeyPair | None, trusted: int) -> str:
    if pair is None:
        place = f"{bracketed(network.host)}:{network.port}"
        return f"front ends of this machine reach this node at tcp://{place}, without keys"
    host = network.host if network.host not in ("0.0.0.0", "::") else socket.gethostname()  # noqa: S104
    who = "1 key is trusted" if trusted == 1 else f"{trusted} keys are trusted"
    who = who if trusted else "no key is trusted yet: `mayfly keys trust NAME KEY`"
    place = f"{bracketed(host)}:{network.port}"
    return f"front ends reach this node at tcp://{pair.public}@{place}; {who}"


class ControlSockets:
    """All sockets of a node's reaper: local sockets for this machine, and TCP sockets (the gateway)
    for front ends on a network if the settings have one. The sockets are bound at once, and closed
    when ``stack`` is. Raises StartError if the gateway cannot be bound."""

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
        """Numbers of front ends' connections and messages that were refused, by reason; they only
        grow."""
        return self._gateway.refusals.counts if self._gateway is not None else {}

    def local_messages(self) -> Iterator[tuple[bytes, list[bytes]]]:
        """Yields the messages that processes of this machine have sent, each as the sender's
        identity and the message's frames."""
        for identity, *frames in self._local.receive():
            yield identity.bytes, [frame.bytes for frame in frames]

    def network_requests(self) -> Iterator[NetworkRequest]:
        """Yields the requests of front ends that have come in over the network."""
        if self._gateway is not None:
            yield from self._gateway.requests()

    def has_new_subscriber(self) -> bool:
        """Returns True if a front end has subscribed to the rosters since the last call."""
        over_network = self._gateway is not None and self._gateway.has_new_subscriber()
        return self._local.has_new_subscriber() or over_network

    def send_to_worker(self, slot: str, incarnation: int, message: ToSlot) -> None:
        self._local.send(f"{slot}#{incarnation}".encode(), message)

    def reply(self, identity: bytes, message: FromNode) -> None:
        self._local.send(identity, message)

    def publish(self, roster: Roster) -> None:
        frame = codec.encode(roster)
        self._local.publish(frame)
        if self._gateway is not None:
            self._gateway.publish(frame)
