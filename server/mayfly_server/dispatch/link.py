"""A front end's connection to one incarnation of a worker.

::

    connecting --handshake--> open --disconnected, silent, gone from the roster--> lost
        \\______________________________________________________________________/

A link carries requests only while it is open, and is never reopened: a connection that comes back
is a new link with a new routing id, so that nothing from before can be taken for something after.
When a link is lost, the messages received until then are delivered first; then every request on it
gets :class:`mayfly_server.dispatch.mailbox.Lost`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from enum import Enum

import structlog
import zmq
from zmq.utils.monitor import parse_monitor_message

from mayfly_protocol.codec import BadFrame, encode, to_front_end
from mayfly_protocol.serving import (
    PING_INTERVAL_S,
    Cancel,
    Detokenized,
    Failed,
    Finish,
    Handover,
    Inquiry,
    Ping,
    Pong,
    Rejected,
    Submit,
    Tokenized,
    Tokens,
)
from mayfly_protocol.transport.sockets import MAX_FRAME_BYTES, configure
from mayfly_server.dispatch.connector import Connect
from mayfly_server.dispatch.mailbox import Lost, Mailbox, Message, WorkerMessage
from mayfly_server.dispatch.rosters import Slot
from mayfly_server.dispatch.zmq_reader import ZmqReader
from mayfly_server.errors import BodyTooLarge

REPORT_LAG_S = 0.75
"""Seconds after its submission in which rosters may not count a request yet."""

_REFUSED = (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)

STALLED_S = 2.0
"""Seconds without progress; longer than a prompt's chunk and a roster's interval together."""

Context = zmq.Context[zmq.Socket[bytes]]


_TERMINAL = (Rejected, Finish, Failed, Handover, Tokenized, Detokenized)


class State(Enum):
    """A link's state, as drawn above."""

    CONNECTING = "connecting"
    OPEN = "open"
    LOST = "lost"


class Link:
    """Connects at once, by ``connect``; has to be made on a running event loop.

    ``on_change`` is called when the state has changed, ``on_message`` for every message about an
    attempt, ``on_late_message`` for those about an attempt that is over.
    """

    def __init__(
        self,
        context: Context,
        slot: Slot,
        *,
        connect: Connect,
        pong_wait_s: float,
        on_change: Callable[[], None],
        on_message: Callable[[], None],
        on_late_message: Callable[[], None],
    ) -> None:
        self.slot = slot
        self.incarnation = slot.incarnation
        self.state = State.CONNECTING
        self._loop = asyncio.get_running_loop()
        self._pong_wait_s = pong_wait_s
        self._on_change = on_change
        self._count_message = on_message
        self._count_late_message = on_late_message
        self._mailboxes: dict[tuple[str, int], Mailbox[Message]] = {}
        self._submitted_at: dict[tuple[str, int], float] = {}
        self._heard_at = self._ticked_at = self.progressed_at = self._loop.time()
        self._busy_since = self.progressed_at
        """The time at which the worker last made progress, or had nothing to do."""
        self._pings = 0
        self._leaving = False
        self._log = structlog.get_logger(__name__).bind(
            node=slot.node, slot=slot.view.slot, incarnation=slot.view.incarnation
        )
        self._socket = context.socket(zmq.DEALER)
        configure(self._socket)
        self._socket.setsockopt(zmq.ROUTING_ID, b"f" + secrets.token_bytes(12))
        monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_DISCONNECTED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        )
        self._monitor = ZmqReader(monitor, self._on_event)
        self._wire = ZmqReader(self._socket, self._on_message)
        connect(self._socket)

    def update_slot(self, slot: Slot) -> None:
        """Takes what the newest roster says of the worker."""
        if slot.view.progress != self.slot.view.progress:
            self.progressed_at = self._busy_since = slot.heard_at
        if not (slot.view.running or slot.view.waiting or self._submitted_at):
            self._busy_since = slot.heard_at
        self.slot = slot
        self._leaving = self._leaving or slot.view.state == "draining"

    @property
    def load(self) -> int:
        """The number of requests that the worker has: those it reported, and those of this front
        end that the report cannot count yet. At least all of this front end's: a worker that has
        stopped reports nothing, and requests pile up there."""
        reported = self.slot.view.running + self.slot.view.waiting
        counted_until = self.slot.heard_at - REPORT_LAG_S
        unseen = sum(at > counted_until for at in self._submitted_at.values())
        return max(reported + unseen, len(self._submitted_at))

    @property
    def stalled_for_s(self) -> float:
        """Seconds that the worker has had something to do and made no progress, by its rosters."""
        return self.slot.heard_at - self._busy_since

    @property
    def stalled(self) -> bool:
        """True if the worker has made no progress for so long that it may be lost."""
        return self.stalled_for_s > STALLED_S

    @property
    def outstanding(self) -> int:
        """The number of this front end's requests that have not ended on this worker."""
        return len(self._mailboxes)

    def submit(self, submit: Submit, mailbox: Mailbox[Message]) -> None:
        """Gives a request to the worker. All messages about it come to the mailbox; the last one is
        terminal or :class:`Lost`.

        Raises:
            BodyTooLarge: the frame is longer than a worker reads. Sending it would cut the
                connection, for every other request, too.
        """
        if self._send_about(submit, mailbox):
            self._submitted_at[submit.rid, submit.attempt] = self._loop.time()

    def ask(self, inquiry: Inquiry, mailbox: Mailbox[Message]) -> None:
        """Asks the worker a question. The answer, and nothing else, comes to the mailbox. Raises
        as :meth:`submit`."""
        self._send_about(inquiry, mailbox)

    def _send_about(self, message: Submit | Inquiry, mailbox: Mailbox[Message]) -> bool:
        frame = encode(message)
        if len(frame) > MAX_FRAME_BYTES:
            raise BodyTooLarge(
                f"What was sent takes {len(frame)} bytes on its way to a worker, and a worker "
                f"reads {MAX_FRAME_BYTES} at most."
            )
        if self.state is not State.OPEN:
            mailbox.put(Lost("not connected", reached=False))
            return False
        self._mailboxes[message.rid, message.attempt] = mailbox
        self._send(frame)
        return True

    def cancel(self, rid: str, attempt: int) -> None:
        """Tells the worker to stop an attempt that nobody waits for any more."""
        if self._forget((rid, attempt)) is not None and self.state is State.OPEN:
            self._send(encode(Cancel(rid, attempt)))

    def ping(self, now: float) -> None:
        """Pings the worker, or loses it after too long a silence. To be called every
        :data:`PING_INTERVAL_S` seconds."""
        if now - self._ticked_at > 3 * PING_INTERVAL_S:
            self._heard_at = now  # this process was asleep itself, or the whole machine was
        self._ticked_at = now
        if self.state is not State.OPEN:
            return
        if now - self._heard_at > self._pong_wait_s:
            self.lose(f"silent for {now - self._heard_at:.1f} s")
            return
        self._pings += 1
        self._send(encode(Ping(self._pings)))

    def lose(self, cause: str) -> None:
        """Logs that the worker is lost, and closes the connection."""
        if self.state is State.OPEN:
            # A worker that was told to go and has none of our requests is lost by intent.
            level = logging.DEBUG if self._leaving and not self.outstanding else logging.INFO
            self._log.log(level, "worker lost", cause=cause, requests=self.outstanding)
        self.close(cause)

    def close(self, cause: str) -> None:
        """Closes the connection. Requests that still run on the worker get :class:`Lost`."""
        if self.state is State.LOST:
            return
        self.state = State.LOST
        self._wire.drain()
        self._socket.disable_monitor()
        self._monitor.close()
        self._wire.close()
        for mailbox in self._mailboxes.values():
            mailbox.put(Lost(cause))
        self._mailboxes.clear()
        self._submitted_at.clear()
        self._on_change()

    def _send(self, frame: bytes) -> None:
        try:
            self._wire.send(frame)
        except zmq.Again:
            self.lose("unreachable, or does not read")

    def _on_event(self, parts: list[bytes]) -> None:
        event = parse_monitor_message(parts)["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED and self.state is State.CONNECTING:
            self.state = State.OPEN
            self._heard_at = self._loop.time()
            self._on_change()
        elif event == zmq.EVENT_DISCONNECTED and self.state is State.OPEN:
            self.lose("disconnected")
        elif event in _REFUSED and self.state is State.CONNECTING:
            self.close("refused by the worker")  # ZeroMQ does not try again; the next roster does

    def _on_message(self, parts: list[bytes]) -> None:
        self._heard_at = self._loop.time()
        try:
            message = to_front_end.decode(parts[-1])
        except BadFrame as error:
            self._log.warning("bad frame from a worker", error=str(error))
            return
        if isinstance(message, Tokens):
            for delta in message.deltas:
                self._deliver(delta)
        elif not isinstance(message, Pong):
            self._deliver(message)

    def _deliver(self, message: WorkerMessage) -> None:
        self._count_message()
        key = (message.rid, message.attempt)
        ends = isinstance(message, _TERMINAL)
        mailbox = self._forget(key) if ends else self._mailboxes.get(key)
        if mailbox is not None:
            mailbox.put(message)
        elif not (isinstance(message, Finish) and message.reason == "cancelled"):
            self._count_late_message()

    def _forget(self, key: tuple[str, int]) -> Mailbox[Message] | None:
        self._submitted_at.pop(key, None)
        return self._mailboxes.pop(key, None)
