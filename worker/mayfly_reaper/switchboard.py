"""The reaper's two sockets: words come in and go out on one, rosters go out on the other."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack

import zmq

from mayfly_protocol import codec
from mayfly_protocol.lifecycle import ToSlot
from mayfly_protocol.roster import ROSTER_TOPIC, FromNode, Roster
from mayfly_protocol.sockets import configure
from mayfly_reaper.paths import Runtime

ROSTERS_QUEUED = 16
"""For a subscriber that does not read: each roster is the full picture."""

FRAMES_A_ROUND = 1000
"""So that no flood of words keeps the reaper from looking at the clock."""

_log = logging.getLogger(__name__)


class Switchboard:
    """Bound at once; closed with the stack."""

    def __init__(self, runtime: Runtime, poller: zmq.Poller, stack: ExitStack) -> None:
        context = stack.enter_context(zmq.Context())
        self._control = stack.enter_context(context.socket(zmq.ROUTER))
        configure(self._control)
        self._control.bind(runtime.control)
        self._roster = stack.enter_context(context.socket(zmq.XPUB))
        configure(self._roster)
        self._roster.setsockopt(zmq.SNDHWM, ROSTERS_QUEUED)
        # Tell of every subscriber, not of the first to a topic: each is sent a roster at once.
        self._roster.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._roster.bind(runtime.roster)
        for socket in (self._control, self._roster):
            poller.register(socket, zmq.POLLIN)

    def words(self) -> Iterator[tuple[bytes, list[bytes]]]:
        """What has come in: who said it, and its frames."""
        for _ in range(FRAMES_A_ROUND):
            try:
                identity, *frames = self._control.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield identity, frames

    def subscribed(self) -> bool:
        """Whether somebody has begun to listen to the rosters since."""
        found = False
        while self._roster.poll(0):
            found = self._roster.recv().startswith(b"\x01") or found
        return found

    def tell_worker(self, slot: str, incarnation: int, message: ToSlot) -> None:
        self._send(f"{slot}#{incarnation}".encode(), message)

    def reply(self, identity: bytes, message: FromNode) -> None:
        self._send(identity, message)

    def publish(self, roster: Roster) -> None:
        """Never blocks: an XPUB drops."""
        self._roster.send_multipart([ROSTER_TOPIC, codec.encode(roster)])

    def _send(self, identity: bytes, message: ToSlot | FromNode) -> None:
        try:
            self._control.send_multipart([identity, codec.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:  # it went away, or does not read
            _log.warning("%r does not hear us: %s", identity[:64], error)
