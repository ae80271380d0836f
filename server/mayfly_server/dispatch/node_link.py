"""A front end's two connections to a node's reaper: one for control messages, one for rosters.

::

    name looked up --> opened --> handshake --> rosters come
           ^              | refused, or nothing comes for REOPEN_S
           +--------------+

ZeroMQ connects again by itself to a node that went away, but not to one that refused its key, and
not always after a network was cut in two. So a connection that has been silent for a while is made
anew, and the node's name is looked up again.
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
"""Seconds of silence after which a connection is made anew."""
ROSTERS_QUEUED = 16
"""Unread rosters that are kept; each is complete."""
MAX_ROSTER_BYTES = 8 << 20

_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)

_log = structlog.get_logger(__name__)


class NodeLink:
    """Connects at once; to be made on a running event loop. ``resolved`` is the node's address
    with its host's IP address in the place of a name.

    ``on_message`` is called with every roster and every answer. ``refusals`` counts frames that are
    neither, and handshakes that the node, or whatever answers in its place, did not pass.
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
        """Asks for the roster, by which a reaper learns that this front end serves. A node that
        cannot be reached yet is asked once it can be."""
        self._announced = True
        self.send(Ask())

    def send(self, message: ToNode) -> bool:
        """Sends a message; returns whether it is on its way. A node that is too old to know the
        message does not get it."""
        if self._control is None or not understood(message, self._minor):
            return False
        try:
            self._control.send(encode(message))
        except zmq.Again:
            name = type(message).__name__
            _log.warning("node does not read its messages", node=str(self.address), message=name)
            return False
        return True

    def reopen_if_silent(self, now: float) -> None:
        """Makes a silent connection anew. To be called about once a second."""
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
        except OSError as error:  # the silence will have the name looked up again
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
            detail = "whatever answers there does not hold the key in its address"
            self._refusals.refuse(str(self.address), "handshake", detail)
