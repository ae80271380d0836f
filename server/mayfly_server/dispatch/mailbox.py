"""The queue of what a worker has said about one attempt at a request, and nobody has read yet.

A client that reads slowly leaves messages here. Beyond the first few they are merged into larger
ones, and their size is bounded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from mayfly_protocol.serving import (
    Accepted,
    Delta,
    Detokenized,
    Failed,
    Finish,
    Handover,
    Progress,
    Rejected,
    Tokenized,
    TokenLogprob,
)

M = TypeVar("M")

UNMERGED = 16
"""Messages that may wait before any are merged: a burst does not make a reader slow."""
MAX_IDS = 256
"""Token ids in one merged delta, so that merging token by token stays cheap."""
_MESSAGE_BYTES = 100
_ID_BYTES = 8
_LOGPROB_BYTES = 80


@dataclass(frozen=True, slots=True)
class Lost:
    """The last message about an attempt whose worker is lost. ``cause`` is for logs; ``reached`` is
    false where the request surely never came to that worker."""

    cause: str
    reached: bool = True


WorkerMessage = (
    Accepted | Rejected | Progress | Delta | Finish | Failed | Handover | Tokenized | Detokenized
)
Message = WorkerMessage | Lost


class Mailbox(Generic[M]):
    """A queue with one reader, who takes everything there is at once: a reader that fell behind
    catches up in one step.

    ``merge`` makes one message of two that follow each other where it can; it is used beyond the
    first :data:`UNMERGED`. ``size`` gives a message's bytes; when those that wait exceed ``limit``,
    ``on_overfull`` is called, each time that another message comes.
    """

    def __init__(
        self,
        *,
        merge: Callable[[M, M], M | None] = lambda last, new: None,
        size: Callable[[M], int] = lambda message: 0,
        limit: int = 0,
        on_overfull: Callable[[], None] = lambda: None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._merge = merge
        self._size = size
        self._limit = limit
        self._on_overfull = on_overfull
        self._messages: list[M] = []
        self._bytes = 0
        self._reader: asyncio.Future[None] | None = None
        self._taken = asyncio.Event()

    def put(self, message: M) -> None:
        """Adds a message and wakes the reader."""
        self._bytes += self._size(message)
        crowded = len(self._messages) > UNMERGED
        merged = self._merge(self._messages[-1], message) if crowded else None
        if merged is None:
            self._messages.append(message)
        else:
            self._messages[-1] = merged
        self._wake()
        if self._bytes > self._limit:
            self._on_overfull()

    async def take(self, timeout_s: float) -> list[M]:
        """Removes and returns all messages, in order. Waits for the first one; returns an empty
        list after ``timeout_s`` seconds without any."""
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


def merge_deltas(last: Message, new: Message) -> Message | None:
    """Makes one delta of two that follow each other; None where they cannot be merged.

    Tool calls stay as they are, and so does text that was followed by a thought: a single delta
    has no room for that order.
    """
    if not (isinstance(last, Delta) and isinstance(new, Delta)):
        return None
    follows = (last.rid, last.attempt, last.choice) == (new.rid, new.attempt, new.choice)
    if not follows or last.index + len(last.ids) != new.index or last.finish is not None:
        return None
    if last.tool_calls or new.tool_calls or (last.text and new.reasoning):
        return None
    if len(last.ids) + len(new.ids) > MAX_IDS:
        return None
    return replace(
        new,
        index=last.index,
        ids=last.ids + new.ids,
        text=last.text + new.text,
        reasoning=last.reasoning + new.reasoning,
        logprobs=last.logprobs + new.logprobs,
    )


def size_of(message: Message) -> int:
    """About how many bytes a message holds."""
    if not isinstance(message, Delta):
        return _MESSAGE_BYTES
    text = len(message.text) + len(message.reasoning)
    calls = sum(len(call.arguments) + _MESSAGE_BYTES for call in message.tool_calls)
    logprobs = sum(map(_logprob_size, message.logprobs))
    return text + _ID_BYTES * len(message.ids) + calls + logprobs


def _logprob_size(logprob: TokenLogprob) -> int:
    return _LOGPROB_BYTES * (1 + len(logprob.top))
