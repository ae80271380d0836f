"""Two sockets that belong together: one for words, one for rosters."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import zmq

from mayfly_protocol import codec
from mayfly_protocol.lifecycle import ToSlot
from mayfly_protocol.roster import ROSTER_TOPIC, FromNode
from mayfly_protocol.sockets import configure

ROSTERS_QUEUED = 16
"""For a subscriber that does not read: each roster is the full picture."""

FRAMES_A_ROUND = 1000
"""So that no flood of words keeps the reaper from looking at the clock."""

_log = logging.getLogger(__name__)


class Exchange:
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
        for socket in (self.control, self.roster):
            poller.register(socket, zmq.POLLIN)

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
