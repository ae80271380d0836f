"""What arrived for one attempt at one request and was not looked at yet."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

M = TypeVar("M")


class Mailbox(Generic[M]):
    """A queue with one reader, who takes everything there is at once: a reader that fell behind
    catches up in one step."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._messages: list[M] = []
        self._reader: asyncio.Future[None] | None = None

    def put(self, message: M) -> None:
        self._messages.append(message)
        self._wake()

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
        return messages

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
