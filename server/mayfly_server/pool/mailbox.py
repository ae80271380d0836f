"""What arrived for one attempt at one request and was not looked at yet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

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
