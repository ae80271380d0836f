"""The queue of a worker's messages about one request that the front end has not read yet.

A client that reads its stream slowly makes messages pile up in this queue. After the first few,
further messages are merged into larger ones, and the size of all of them has a limit.
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
    ToolCallDelta,
)

M = TypeVar("M")

UNMERGED = 16
"""Number of unread messages from which on further ones are merged: a reader is not slow just
because several messages come at once."""
MAX_IDS = 256
"""Largest number of token ids in a merged message. Merging copies all of them for each new token,
so a limit keeps merging cheap."""
_MESSAGE_BYTES = 100
_ID_BYTES = 8
_LOGPROB_BYTES = 80


@dataclass(frozen=True, slots=True)
class Lost:
    """The last message about a request whose worker is lost; the front end makes it itself.
    ``cause`` is a text for logs; ``reached`` is false if the request certainly never reached the
    worker."""

    cause: str
    reached: bool = True


WorkerMessage = (
    Accepted | Rejected | Progress | Delta | Finish | Failed | Handover | Tokenized | Detokenized
)
Message = WorkerMessage | Lost


class Mailbox(Generic[M]):
    """A queue of messages with a single reader. The reader takes all waiting messages in one step,
    so that a slow reader catches up.

    Args:
        merge: merges a new message into the last waiting one; returns None if these two cannot be
            merged. Called only while more than :data:`UNMERGED` messages wait.
        size: returns the size of a message in bytes.
        limit: the number of bytes that may wait.
        on_overfull: called for each new message while the waiting messages exceed ``limit``.
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
        """Adds a message and wakes the reader. If many messages wait, the new one is merged into
        the last of them where possible."""
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
        """Removes all waiting messages and returns them in order. If none waits, waits for the next
        message; returns an empty list if none comes within ``timeout_s`` seconds."""
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
        """Waits until the reader has taken all messages that wait now."""
        if self._messages:
            self._taken.clear()
            await self._taken.wait()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def merge_deltas(last: Message, new: Message) -> Message | None:
    """Merges two deltas (newly generated tokens with their text) that follow each other in one
    choice of a request; returns None if they cannot be merged.

    Text or a tool call with reasoning after it, and text and a tool call in either order, are not
    merged: a single delta cannot express their order.
    """
    if not (isinstance(last, Delta) and isinstance(new, Delta)):
        return None
    follows = (last.rid, last.attempt, last.choice) == (new.rid, new.attempt, new.choice)
    if not follows or last.index + len(last.ids) != new.index or last.finish is not None:
        return None
    if (last.tool_calls or last.text) and new.reasoning:
        return None
    if (last.tool_calls and new.text) or (last.text and new.tool_calls):
        return None
    if len(last.ids) + len(new.ids) > MAX_IDS:
        return None
    return replace(
        new,
        index=last.index,
        ids=last.ids + new.ids,
        text=last.text + new.text,
        reasoning=last.reasoning + new.reasoning,
        tool_calls=_merge_calls(last.tool_calls, new.tool_calls),
        logprobs=last.logprobs + new.logprobs,
        prompt_logprobs=last.prompt_logprobs + new.prompt_logprobs,
    )


def _merge_calls(
    last: tuple[ToolCallDelta, ...], new: tuple[ToolCallDelta, ...]
) -> tuple[ToolCallDelta, ...]:
    """Joins the tool calls of two deltas that follow each other. If the first piece in ``new`` goes
    on with the last call in ``last``, these two become one piece."""
    if not last or not new or new[0].name is not None:
        return last + new
    joined = replace(
        last[-1],
        arguments=last[-1].arguments + new[0].arguments,
        unfinished=new[0].unfinished,
    )
    return (*last[:-1], joined, *new[1:])


def size_of(message: Message) -> int:
    """Estimates the size of a message in bytes."""
    if not isinstance(message, Delta):
        return _MESSAGE_BYTES
    text = len(message.text) + len(message.reasoning)
    calls = sum(len(call.arguments) + _MESSAGE_BYTES for call in message.tool_calls)
    logprobs = sum(map(_logprob_size, (*message.logprobs, *message.prompt_logprobs)))
    return text + _ID_BYTES * len(message.ids) + calls + logprobs


def _logprob_size(logprob: TokenLogprob) -> int:
    return _LOGPROB_BYTES * (1 + len(logprob.top))
