"""A front end's two connections to a node's reaper: one for what it says, one for its rosters.

::

    name looked up --> opened --> handshake --> rosters come
           ^              | refused, or nothing comes for REOPEN_S
           +--------------+

ZeroMQ connects again by itself to a node that went away, but not to one that refused its key, and
not always out of a network that was cut in two. So a connection on which nothing has come for a
while is made anew, which also looks up the node's name again.
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
from mayfly_server.dispatch.connector import Dial, Dialler, lookup
from mayfly_server.dispatch.link import Context
from mayfly_server.dispatch.zmq_reader import Listener

REOPEN_S = 6.0
ROSTERS_QUEUED = 16
"""Unread ones; each is the full picture."""
MAX_ROSTER_BYTES = 8 << 20

_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)

_log = structlog.get_logger(__name__)


class NodeLink:
    """Begins at once; to be made on a running event loop. ``dialled`` is the node's address, with
    that of its host in the place of a name.

    ``said`` is called with every roster and every answer; ``refusals`` counts frames that are
    neither, and handshakes that the node, or what answers in its place, did not pass.
    """

    def __init__(
        self,
        context: Context,
        address: NodeAddress,
        dialler: Dialler,
        *,
        said: Callable[[FromNode], None],
        refusals: Refusals,
    ) -> None:
        self.address = address
        self._context = context
        self.dialled = address
        self._dialler = dialler
        self._said = said
        self._refusals = refusals
        self._complain = LogThrottle(_log.warning)
        self._loop = asyncio.get_running_loop()
        self._heard_at = self._loop.time()
        self._announced = False
        self._minor = 0
        self._listeners: list[Listener] = []
        self._monitored: list[zmq.Socket[Any]] = []
        self._words: Listener | None = None
        self._lookup: asyncio.Task[None] | None = None
        self._open()

    def announce(self) -> None:
        """Asks for the roster, which is how a reaper learns that this front end serves. A node that
        cannot be reached yet gets the question when it can."""
        self._announced = True
        self.tell(Ask())

    def tell(self, message: ToNode) -> bool:
        """Whether it is on its way. What a node is too old to know is not sent to it."""
        if self._words is None or not understood(message, self._minor):
            return False
        try:
            self._words.send(encode(message))
        except zmq.Again:
            said = type(message).__name__
            _log.warning("a node does not read", node=str(self.address), said=said)
            return False
        return True

    def tick(self, now: float) -> None:
        """To be called about once a second."""
        if now - self._heard_at > REOPEN_S:
            self._heard_at = now
            self.close()
            self._open()

    def close(self) -> None:
        if self._lookup is not None:
            self._lookup.cancel()
        self._words = None
        for socket in self._monitored:
            socket.disable_monitor()
        for listener in self._listeners:
            listener.close()
        self._monitored.clear()
        self._listeners.clear()

    def _open(self) -> None:
        host = self.address.host
        if host and not is_ip_address(host):
            self._lookup = asyncio.create_task(self._look_up(host), name=f"look up {host}")
        else:
            self._dial(self.address)

    async def _look_up(self, host: str) -> None:
        try:
            found = await lookup(host)
        except OSError as error:  # it is asked again when the node is silent for long enough
            self._complain(f"{self.address}: its host is not found", str(error))
            return
        self._dial(self.address.at(found))

    def _dial(self, dialled: NodeAddress) -> None:
        self.dialled = dialled
        self._heard_at = self._loop.time()
        dialler = self._dialler
        self._words = self._listener(zmq.DEALER, dialler.control(dialled), from_node)
        self._listener(zmq.SUB, dialler.roster(dialled), rosters)
        if self._announced:
            self.tell(Ask())

    def _listener(self, kind: int, dial: Dial, channel: Channel[Any]) -> Listener:
        socket = self._context.socket(kind)
        configure(socket)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_ROSTER_BYTES)
        socket.setsockopt(zmq.RCVHWM, ROSTERS_QUEUED)
        if kind == zmq.SUB:
            socket.setsockopt(zmq.SUBSCRIBE, ROSTER_TOPIC)
        monitor = Listener(socket.get_monitor_socket(_FAILED), self._on_failure)
        listener = Listener(socket, lambda parts: self._take(parts, channel))
        self._monitored.append(socket)
        self._listeners += [monitor, listener]
        dial(socket)
        return listener

    def _take(self, parts: list[bytes], channel: Channel[Any]) -> None:
        try:
            message = channel.decode(parts[-1])
        except BadFrame as error:
            self._refusals.refuse(str(self.address), error.reason, str(error))
            return
        self._heard_at = self._loop.time()
        if isinstance(message, Roster):
            self._minor = message.minor
        self._said(message)

    def _on_failure(self, parts: list[bytes]) -> None:
        event = parse_monitor_message(parts)["event"]
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            detail = "it does not trust this front end's key"
            self._refusals.refuse(str(self.address), "untrusted", detail)
        else:
            detail = "what answers there is not the holder of the key in its address"
            self._refusals.refuse(str(self.address), "handshake", detail)
