"""A front end's two connections to a node's reaper, the process that watches the node's workers:
one for control messages, one for rosters (the lists of the workers and their states).

::

    name looked up --> opened --> handshake --> rosters come
           ^              | refused, or nothing comes for REOPEN_S
           +--------------+

ZeroMQ reconnects by itself to a node that has ended and started again, but not to a node that
refused the front end's key, and not always after a network partition. So connections that have been
silent for a while are replaced by new ones, and the node's host name is looked up again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import structlog
import zmq
from zmq.utils.monitor import parse_monitor_message

from mayfly_protocol.codec import BadFrame, Channel, encode, from_node, rosters, understood
from mayfly_protocol.common.throttle import LogThrottle
from mayfly_protocol.roster import ROSTER_TOPIC, Ask, FromNode, Roster, ToNode
from mayfly_protocol.transport.addresses import NodeAddress, is_ip_address
from mayfly_protocol.transport.sockets import configure
from mayfly_protocol.transport.zap import Refusals
from mayfly_server.dispatch.connector import Connect, Connector, resolve_host
from mayfly_server.dispatch.link import Context
from mayfly_server.dispatch.zmq_reader import ZmqReader

REOPEN_S = 6.0
"""Seconds without a message from a node after which the connections to it are replaced."""
ROSTERS_QUEUED = 16
"""Number of unread rosters (a node's lists of its workers) that ZeroMQ keeps. Each roster is
complete, so a lost one does no harm."""
MAX_ROSTER_BYTES = 8 << 20

_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)

_log = structlog.get_logger(__name__)


class NodeLink:
    """A front end's two connections to a node's reaper, the process that watches the workers. It
    has to be made on a running event loop, and connects at once.

    Args:
        on_message: called with every roster (list of the node's workers) and every answer.
        refusals: counts frames that cannot be decoded, and failed handshakes: the node refused the
            front end's key, or a server at the node's address does not hold the node's key.

    Attributes:
        address: the node's address in the front end's settings.
        resolved: that address with the host's IP address in place of its name.
    """

    def __init__(
        self,
        context: Context,
        address: NodeAddress,
        connector: Connector,
        *,
        on_message: Callable[[FromNode], None],
        refusals: Refusals,
    ) -> None:
        self.address = address
        self._context = context
        self.resolved = address
        self._connector = connector
        self._on_message = on_message
        self._refusals = refusals
        self._warn = LogThrottle(_log.warning)
        self._loop = asyncio.get_running_loop()
        self._heard_at = self._loop.time()
        self._announced = False
        self._minor = 0
        self._readers: list[ZmqReader] = []
        self._monitored: list[zmq.Socket[Any]] = []
        self._control: ZmqReader | None = None
        self._lookup: asyncio.Task[None] | None = None
        self._open()

    def announce(self) -> None:
        """Tells the node that this front end serves clients, by asking for the list of the node's
        workers. If the node cannot be reached yet, the list is asked for as soon as the node can be
        reached."""
        self._announced = True
        self.send(Ask())

    def send(self, message: ToNode) -> bool:
        """Sends a message to the node's reaper. Returns False if it was not sent: the node is not
        connected, does not read, or runs a version that does not know this message."""
        if self._control is None or not understood(message, self._minor):
            return False
        try:
            self._control.send(encode(message))
        except zmq.Again:
            name = type(message).__name__
            _log.warning(
                "message to a node dropped: the node does not read its messages",
                node=str(self.address),
                message=name,
            )
            return False
        return True

    def reopen_if_silent(self, now: float) -> None:
        """Replaces the connections if the node has been silent for more than :data:`REOPEN_S`
        seconds. To be called about once a second."""
        if now - self._heard_at > REOPEN_S:
            self._heard_at = now
            self.close()
            self._open()

    def close(self) -> None:
        if self._lookup is not None:
            self._lookup.cancel()
        self._control = None
        for socket in self._monitored:
            socket.disable_monitor()
        for reader in self._readers:
            reader.close()
        self._monitored.clear()
        self._readers.clear()

    def _open(self) -> None:
        host = self.address.host
        if host and not is_ip_address(host):
            self._lookup = asyncio.create_task(self._look_up(host), name=f"look up {host}")
        else:
            self._connect(self.address)

    async def _look_up(self, host: str) -> None:
        try:
            found = await resolve_host(host)
        except OSError as error:  # reopen_if_silent looks the name up again
            self._warn(f"{self.address}: host name cannot be resolved", str(error))
            return
        self._connect(self.address.at(found))

    def _connect(self, resolved: NodeAddress) -> None:
        self.resolved = resolved
        self._heard_at = self._loop.time()
        self._control = self._reader(zmq.DEALER, self._connector.control(resolved), from_node)
        self._reader(zmq.SUB, self._connector.roster(resolved), rosters)
        if self._announced:
            self.send(Ask())

    def _reader(self, kind: int, connect: Connect, channel: Channel[Any]) -> ZmqReader:
        socket = self._context.socket(kind)
        configure(socket)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_ROSTER_BYTES)
        socket.setsockopt(zmq.RCVHWM, ROSTERS_QUEUED)
        if kind == zmq.SUB:
            socket.setsockopt(zmq.SUBSCRIBE, ROSTER_TOPIC)
        monitor = ZmqReader(socket.get_monitor_socket(_FAILED), self._on_failure)
        reader = ZmqReader(socket, lambda parts: self._receive(parts, channel))
        self._monitored.append(socket)
        self._readers += [monitor, reader]
        connect(socket)
        return reader

    def _receive(self, parts: list[bytes], channel: Channel[Any]) -> None:
        try:
            message = channel.decode(parts[-1])
        except BadFrame as error:
            self._refusals.refuse(str(self.address), error.reason, str(error))
            return
        self._heard_at = self._loop.time()
        if isinstance(message, Roster):
            self._minor = message.minor
        self._on_message(message)

    def _on_failure(self, parts: list[bytes]) -> None:
        event = parse_monitor_message(parts)["event"]
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            detail = "the node does not trust this front end's key"
            self._refusals.refuse(str(self.address), "untrusted", detail)
        else:
            detail = "the server that answers there does not hold the key in the node's address"
            self._refusals.refuse(str(self.address), "handshake", detail)
