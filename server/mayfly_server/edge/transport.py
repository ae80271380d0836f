"""Closing a connection so that its client gets to read the last answer.

Data that comes in after a socket was closed makes the kernel send a reset, and a reset throws away
what the other side had not read yet. So a server that refuses a request in its middle must not
close at once: it ends its own direction, reads and forgets what still comes, and closes when the
client has done so or a short time is over ("lingering close", as in nginx).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class LingeringTransport(asyncio.Transport):
    """A transport whose :meth:`close` lingers where ``unread()`` says that more may come.

    Either way the connection is cut ``linger_s`` seconds later, if the client has not read what it
    was sent by then.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        *,
        unread: Callable[[], bool],
        linger_s: float,
    ) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._unread = unread
        self._linger_s = linger_s
        self._closing = False
        self._last: asyncio.TimerHandle | None = None
        # What every chunk of every stream passes takes no detour.
        self.write = transport.write  # type: ignore[method-assign]
        self.pause_reading = transport.pause_reading  # type: ignore[method-assign]
        self.resume_reading = transport.resume_reading  # type: ignore[method-assign]
        self.get_extra_info = transport.get_extra_info  # type: ignore[method-assign]
        self.abort = transport.abort  # type: ignore[method-assign]

    def close(self) -> None:
        if self.is_closing():
            return
        self._closing = True
        self._last = self._loop.call_later(self._linger_s, self.abort)
        if self._unread() and self._transport.can_write_eof():
            self._transport.write_eof()
            self._transport.resume_reading()
        else:
            self._transport.close()

    def is_closing(self) -> bool:
        return self._closing or self._transport.is_closing()

    def lost(self) -> None:
        """The connection is gone: nothing is left to be cut."""
        self._closing = True
        if self._last is not None:
            self._last.cancel()

    def can_write_eof(self) -> bool:
        return self._transport.can_write_eof()

    def write_eof(self) -> None:
        self._transport.write_eof()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._transport.set_protocol(protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._transport.get_protocol()

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size()

    def set_write_buffer_limits(self, high: Any = None, low: Any = None) -> None:
        self._transport.set_write_buffer_limits(high, low)
