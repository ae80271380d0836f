"""A front end's connection to one incarnation of a worker.

::

    connecting --handshake--> open --disconnected, silent, gone from the roster--> lost
        \\______________________________________________________________________/

A link carries requests only while it is open, and is never reopened: a connection that comes back
is a new link with a new routing id, so that nothing from before can be taken for something after.
When it is lost, what was received until then is delivered first, then every request on it is told.

What arrived for one attempt at one request and was not looked at yet.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

import structlog
import zmq
from zmq.utils.monitor import parse_monitor_message

from mayfly_protocol.codec import BadFrame, encode, to_front_end
from mayfly_protocol.serving import (
    PING_INTERVAL_S,
    Accepted,
    Cancel,
    Delta,
    Detokenized,
    Failed,
    Finish,
    Handover,
    Inquiry,
    Ping,
    Pong,
    Progress,
    Rejected,
    Submit,
    Tokenized,
    Tokens,
)
from mayfly_protocol.transport.sockets import MAX_FRAME_BYTES, configure
from mayfly_server.dispatch.connector import Dial
from mayfly_server.dispatch.rosters import Slot
from mayfly_server.dispatch.zmq_reader import Listener
from mayfly_server.errors import BodyTooLarge

M = TypeVar("M")

APART = 16
"""Messages that come faster than they are read without anybody being slow."""


class Mailbox(Generic[M]):
    """A queue with one reader, who takes everything there is at once: a reader that fell behind
    catches up in one step.

    ``join`` makes one of two messages that follow each other where it can: beyond the first
    :data:`APART`, so that what waits for a slow reader takes less room. ``weigh`` gives a message's
    bytes; when those that wait exceed ``limit``, ``overfull`` is called, each time that another one
    comes.
    """

    def __init__(
        self,
        *,
        join: Callable[[M, M], M | None] = lambda last, new: None,
        weigh: Callable[[M], int] = lambda message: 0,
        limit: int = 0,
        overfull: Callable[[], None] = lambda: None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._join = join
        self._weigh = weigh
        self._limit = limit
        self._overfull = overfull
        self._messages: list[M] = []
        self._bytes = 0
        self._reader: asyncio.Future[None] | None = None
        self._taken = asyncio.Event()

    def put(self, message: M) -> None:
        self._bytes += self._weigh(message)
        late = len(self._messages) > APART
        joined = self._join(self._messages[-1], message) if late else None
        if joined is None:
            self._messages.append(message)
        else:
            self._messages[-1] = joined
        self._wake()
        if self._bytes > self._limit:
            self._overfull()

    async def take(self, timeout_s: float) -> list[M]:
        """What arrived, in order; after ``timeout_s`` seconds without anything, an empty list."""
        if not self._messages:
            self._reader = self._loop.create_future()
            timer = self._loop.call_later(timeout_s, self._wake)
            try:
                await self._reader
            finally:
                timer.cancel()
                self._reader = None
        messages, self._messages = self._messages, []
        self._bytes = 0
        self._taken.set()
        return messages

    async def taken(self) -> None:
        """Returns when everything that is there now has been taken."""
        if self._messages:
            self._taken.clear()
            await self._taken.wait()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


REPORT_LAG_S = 0.75
"""A roster that came this soon after a request was submitted may not count it yet."""

_REFUSED = (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)

STALLED_S = 2.0
"""Longer than a chunk of a prompt and a roster's interval together."""

Context = zmq.Context[zmq.Socket[bytes]]


@dataclass(frozen=True, slots=True)
class Lost:
    """The last thing that a request hears of a worker that is gone. ``cause`` is for logs;
    ``reached`` is false where the request surely never came to that worker."""

    cause: str
    reached: bool = True


Said = Accepted | Rejected | Progress | Delta | Finish | Failed | Handover | Tokenized | Detokenized
Message = Said | Lost
_TERMINAL = (Rejected, Finish, Failed, Handover, Tokenized, Detokenized)


class State(Enum):
    CONNECTING = "connecting"
    OPEN = "open"
    LOST = "lost"


class Link:
    """Connects at once, as ``dial`` does; has to be made on a running event loop.

    ``changed`` is called when the state has become another, ``heard`` with every message about an
    attempt, and ``late`` with those about one that is over.
    """

    def __init__(
        self,
        context: Context,
        slot: Slot,
        *,
        dial: Dial,
        pong_wait_s: float,
        changed: Callable[[], None],
        heard: Callable[[], None],
        late: Callable[[], None],
    ) -> None:
        self.slot = slot
        self.incarnation = slot.incarnation
        self.state = State.CONNECTING
        self._loop = asyncio.get_running_loop()
        self._pong_wait_s = pong_wait_s
        self._changed = changed
        self._heard = heard
        self._late = late
        self._mailboxes: dict[tuple[str, int], Mailbox[Message]] = {}
        self._submitted_at: dict[tuple[str, int], float] = {}
        self._heard_at = self._ticked_at = self.progressed_at = self._loop.time()
        self._busy_since = self.progressed_at
        """When it last moved, or had nothing to do."""
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
        self._monitor = Listener(monitor, self._on_event)
        self._wire = Listener(self._socket, self._on_message)
        dial(self._socket)

    def follow(self, slot: Slot) -> None:
        """Takes in what the newest roster says about the worker."""
        if slot.view.progress != self.slot.view.progress:
            self.progressed_at = self._busy_since = slot.heard_at
        if not (slot.view.running or slot.view.waiting or self._submitted_at):
            self._busy_since = slot.heard_at
        self.slot = slot
        self._leaving = self._leaving or slot.view.state == "draining"

    @property
    def load(self) -> int:
        """Requests that the worker has: those it reported, and ours that it cannot have yet. At
        least all of ours: one that has stopped reports nothing, and they pile up there."""
        reported = self.slot.view.running + self.slot.view.waiting
        counted_until = self.slot.heard_at - REPORT_LAG_S
        unseen = sum(at > counted_until for at in self._submitted_at.values())
        return max(reported + unseen, len(self._submitted_at))

    @property
    def still_s(self) -> float:
        """For how long it has had something to do and has not moved, by what its node says."""
        return self.slot.heard_at - self._busy_since

    @property
    def stalled(self) -> bool:
        """Whether the worker stands still for so long that it may be lost, and nobody knows yet."""
        return self.still_s > STALLED_S

    @property
    def outstanding(self) -> int:
        """Our own requests that have not ended on this worker."""
        return len(self._mailboxes)

    def submit(self, submit: Submit, mailbox: Mailbox[Message]) -> None:
        """Hands a request to the worker; everything about it will be in the mailbox, and the last
        thing there is a terminal message or :class:`Lost`.

        Raises:
            BodyTooLarge: it is more than a worker reads. Sent all the same, it would cut the
                connection, for every other request, too.
        """
        if self._hand_over(submit, mailbox):
            self._submitted_at[submit.rid, submit.attempt] = self._loop.time()

    def ask(self, inquiry: Inquiry, mailbox: Mailbox[Message]) -> None:
        """Asks the worker something: the answer, and nothing else, will be in the mailbox. Raises
        as :meth:`submit`."""
        self._hand_over(inquiry, mailbox)

    def _hand_over(self, message: Submit | Inquiry, mailbox: Mailbox[Message]) -> bool:
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

    def abandon(self, rid: str, attempt: int) -> None:
        """Nobody waits for this attempt any more: the worker is told to stop."""
        if self._forget((rid, attempt)) is not None and self.state is State.OPEN:
            self._send(encode(Cancel(rid, attempt)))

    def tick(self, now: float) -> None:
        """To be called every :data:`PING_INTERVAL_S` seconds."""
        if now - self._ticked_at > 3 * PING_INTERVAL_S:
            self._heard_at = now  # we were asleep ourselves, or the whole machine was
        self._ticked_at = now
        if self.state is not State.OPEN:
            return
        if now - self._heard_at > self._pong_wait_s:
            self.lose(f"silent for {now - self._heard_at:.1f} s")
            return
        self._pings += 1
        self._send(encode(Ping(self._pings)))

    def lose(self, cause: str) -> None:
        """The worker is gone for good, as far as this link is concerned."""
        if self.state is State.OPEN:
            # One that was told to go, and has nothing left of ours, is no news.
            level = logging.DEBUG if self._leaving and not self.outstanding else logging.INFO
            self._log.log(level, "worker lost", cause=cause, requests=self.outstanding)
        self.close(cause)

    def close(self, cause: str) -> None:
        """What still runs on the worker gets :class:`Lost`."""
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
        self._changed()

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
            self._changed()
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

    def _deliver(self, message: Said) -> None:
        self._heard()
        key = (message.rid, message.attempt)
        ends = isinstance(message, _TERMINAL)
        mailbox = self._forget(key) if ends else self._mailboxes.get(key)
        if mailbox is not None:
            mailbox.put(message)
        elif not (isinstance(message, Finish) and message.reason == "cancelled"):
            self._late()

    def _forget(self, key: tuple[str, int]) -> Mailbox[Message] | None:
        self._submitted_at.pop(key, None)
        return self._mailboxes.pop(key, None)
