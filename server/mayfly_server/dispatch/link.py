"""A front end's connection to one worker process.

::

    connecting --handshake--> open --disconnected, silent, not in the roster--> lost
        \\______________________________________________________________________/

The roster is the list of its workers that a node sends regularly. A link carries requests only
while it is open, and is never reopened: to connect again, a new link with a new ZeroMQ routing id
is made, so that no message of the old connection can be taken for one of the new connection. When a
link is lost, the messages that it has received are delivered first; then every request on the link
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
"""Seconds after a request's submission to a worker in which the worker's own count of its requests,
as its node reports it, may not include that request yet."""

_REFUSED = (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)

STALLED_S = 2.0
"""Seconds after which a busy worker without progress counts as stalled: longer than the prefill of
one chunk of a prompt and the interval between two reports of the worker's progress together."""

Context = zmq.Context[zmq.Socket[bytes]]


_TERMINAL = (Rejected, Finish, Failed, Handover, Tokenized, Detokenized)


class State(Enum):
    """State of a front end's connection to a worker. Only an open link carries requests; a lost
    link is never opened again."""

    CONNECTING = "connecting"
    OPEN = "open"
    LOST = "lost"


class Link:
    """A front end's connection to one worker process. It has to be made on a running event loop,
    and connects at once.

    Args:
        slot: the worker, by the latest roster of its node (the list of its workers).
        connect: connects a socket to the worker.
        pong_wait_s: seconds without any message after which the worker is lost.
        on_change: called when the link's state has changed.
        on_message: called for every message from the worker about a request.
        on_late_message: called for each message about a request that has already ended here.
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
        """The time of the node's last report by which the worker had made progress, or had no
        requests."""
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
        """Takes the worker's state and counters, as the worker's node reported them last."""
        if slot.view.progress != self.slot.view.progress:
            self.progressed_at = self._busy_since = slot.heard_at
        if not (slot.view.running or slot.view.waiting or self._submitted_at):
            self._busy_since = slot.heard_at
        self.slot = slot
        self._leaving = self._leaving or slot.view.state == "draining"

    @property
    def load(self) -> int:
        """The number of requests that the worker has: the requests of all front ends that the
        worker's node reported, and this front end's latest ones, which that report cannot count
        yet. It is never less than the number of this front end's requests, because the count of a
        worker that hangs does not grow."""
        reported = self.slot.view.running + self.slot.view.waiting
        counted_until = self.slot.heard_at - REPORT_LAG_S
        unseen = sum(at > counted_until for at in self._submitted_at.values())
        return max(reported + unseen, len(self._submitted_at))

    @property
    def stalled_for_s(self) -> float:
        """Seconds for which the worker has had requests and made no progress, as its node
        reports."""
        return self.slot.heard_at - self._busy_since

    @property
    def stalled(self) -> bool:
        """True if the worker has requests and made no progress for more than :data:`STALLED_S`
        seconds."""
        return self.stalled_for_s > STALLED_S

    @property
    def outstanding(self) -> int:
        """The number of this front end's requests and questions that the worker has not ended
        yet."""
        return len(self._mailboxes)

    def submit(self, submit: Submit, mailbox: Mailbox[Message]) -> None:
        """Sends a request to the worker. All of the worker's messages about the request are put
        into the mailbox; the last message ends the request on this worker, or is :class:`Lost` if
        the worker is lost.

        Raises:
            BodyTooLarge: the request's frame is longer than a worker reads. Sending it would cut
                the connection and so end all other requests on it.
        """
        if self._send_about(submit, mailbox):
            self._submitted_at[submit.rid, submit.attempt] = self._loop.time()

    def ask(self, inquiry: Inquiry, mailbox: Mailbox[Message]) -> None:
        """Asks the worker a question that needs no inference, such as the tokens of a text. Only
        the answer is put into the mailbox, or :class:`Lost` if the worker is lost. Raises
        BodyTooLarge if the question's frame is longer than a worker reads."""
        self._send_about(inquiry, mailbox)

    def _send_about(self, message: Submit | Inquiry, mailbox: Mailbox[Message]) -> bool:
        frame = encode(message)
        if len(frame) > MAX_FRAME_BYTES:
            raise BodyTooLarge(
                f"The request takes {len(frame)} bytes on its way to a worker, and a worker "
                f"reads {MAX_FRAME_BYTES} at most."
            )
        if self.state is not State.OPEN:
            mailbox.put(Lost("not connected", reached=False))
            return False
        self._mailboxes[message.rid, message.attempt] = mailbox
        self._send(frame)
        return True

    def cancel(self, rid: str, attempt: int) -> None:
        """Tells the worker to stop the request ``rid``, because nobody waits for its result any
        more. ``attempt`` counts the submissions of the request to any workers, from 1 on."""
        if self._forget((rid, attempt)) is not None and self.state is State.OPEN:
            self._send(encode(Cancel(rid, attempt)))

    def ping(self, now: float) -> None:
        """Sends the worker a ping, or closes the connection if the worker has been silent for more
        than ``pong_wait_s``. To be called every :data:`PING_INTERVAL_S` seconds."""
        if now - self._ticked_at > 3 * PING_INTERVAL_S:
            self._heard_at = now  # this process did not run, or the machine was asleep
        self._ticked_at = now
        if self.state is not State.OPEN:
            return
        if now - self._heard_at > self._pong_wait_s:
            self.lose(f"silent for {now - self._heard_at:.1f} s")
            return
        self._pings += 1
        self._send(encode(Ping(self._pings)))

    def lose(self, cause: str) -> None:
        """Logs that the worker is lost, and closes the connection. The mailboxes of its requests
        get :class:`Lost` as the last message."""
        if self.state is State.OPEN:
            # A worker that was asked to end and has none of our requests is lost by intent.
            level = logging.DEBUG if self._leaving and not self.outstanding else logging.INFO
            self._log.log(
                level,
                "worker lost: its requests continue on other workers",
                cause=cause,
                requests=self.outstanding,
            )
        self.close(cause)

    def close(self, cause: str) -> None:
        """Closes the connection. The mailboxes of requests that still run on the worker get
        :class:`Lost` as the last message. Does nothing if the connection is closed already."""
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
            self.lose("unreachable, or does not read its messages")

    def _on_event(self, parts: list[bytes]) -> None:
        event = parse_monitor_message(parts)["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED and self.state is State.CONNECTING:
            self.state = State.OPEN
            self._heard_at = self._loop.time()
            self._on_change()
        elif event == zmq.EVENT_DISCONNECTED and self.state is State.OPEN:
            self.lose("disconnected")
        elif event in _REFUSED and self.state is State.CONNECTING:
            self.close("refused by the worker")  # the next roster makes a new link

    def _on_message(self, parts: list[bytes]) -> None:
        self._heard_at = self._loop.time()
        try:
            message = to_front_end.decode(parts[-1])
        except BadFrame as error:
            self._log.warning("frame from a worker dropped: it cannot be decoded", error=str(error))
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
