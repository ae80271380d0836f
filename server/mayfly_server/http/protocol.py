"""The HTTP protocol of a connection: limits on its bytes and time before a request is understood.

Uvicorn limits neither the number and the size of headers, nor the time that a request takes to
arrive, nor the time that an answer may stay unread. :class:`LimitedHttpProtocol` does::

                     accept                     too many connections: 503
                       |
        +------------> |  first byte, or none
        |              v
        |            HEAD      head_wait_s           : 408
        |              |       bytes, headers, address: 431, 431, 414
        |              v
        |            BODY      body_wait_s, and 1 s more for every body_bytes_per_s bytes: 408
        |              |       (its length is limited by the middleware BodyLimit)
        |              v
        |            ANSWER    unread for slow_reader_s: cut
        | keep-alive   |
        +--------------+

The time limits of HEAD and BODY do not run while the server itself does not read from the
connection, as when a request comes in while an earlier one is being answered (pipelining). If these
early bytes turn out to be invalid, they get no answer, and the connection ends after the present
answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from mayfly_server.errors import (
    AddressTooLong,
    HeadersTooLarge,
    InvalidRequest,
    RequestError,
    RequestTimeout,
    TooManyConnections,
)
from mayfly_server.http import sse
from mayfly_server.settings import ConnectionLimits

_FRAMING = 8
"""Number of bytes of chunked encoding allowed for each byte of a body; a chunk with one byte of the
body has five bytes of encoding."""


class LingeringTransport(asyncio.Transport):
    """A transport that lets the client read the last answer before it closes.

    If data comes in after a socket was closed, the kernel sends a TCP reset, and the reset discards
    the answer that the client has not read yet. So a server that refuses a request before its end
    must not close at once. If ``unread()`` is true (more data may come), :meth:`close` ends only
    the sending direction, reads and discards data until the client closes, too ("lingering close",
    as in nginx). After ``linger_s`` seconds the connection is cut in any case.
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
        # These methods are called for every chunk of every stream, so they are called directly.
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
        """Stops the timer that would cut the connection, because the connection has ended."""
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


class PersistentParser:
    """An HTTP/1.1 parser that ignores the header ``Upgrade``, by which a client asks for another
    protocol. Java's own HTTP client sends ``Upgrade: h2c`` with each request by default.

    A server may ignore the header (RFC 9110, 7.8), but httptools' parser stops after the head of
    such a request, as if the following bytes, which are the request's body, belonged to the other
    protocol. So a new parser parses the head once more, without ``Upgrade``, and then the rest::

        head, Upgrade --> HttpParserUpgrade --> another parser: the same head, less one field
                                                     |
                          what followed the head ----+--> body, next request ...

    The class has those methods of httptools' parser that Uvicorn uses.

    Args:
        callbacks: the object with the parser's callback methods. While ``should_upgrade()`` is
            true, its methods for the end of a head and of a message must do nothing.
        head: returns the present request's head as bytes, without ``Upgrade``.
    """

    def __init__(self, callbacks: object, head: Callable[[], bytes]) -> None:
        self._callbacks = callbacks
        self._head = head
        self._begin()

    def _begin(self) -> None:
        parser = httptools.HttpRequestParser(self._callbacks)
        # As in Uvicorn: bytes after a request that closes the connection are no error.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.get_method = parser.get_method
        self.get_http_version = parser.get_http_version
        self.should_keep_alive = parser.should_keep_alive
        self.should_upgrade = parser.should_upgrade
        self._feed = parser.feed_data

    def feed_data(self, data: bytes) -> None:
        """Parses the next bytes of the connection, and calls the callbacks. Raises
        httptools.HttpParserError if they are not HTTP."""
        left = memoryview(data)
        while True:
            try:
                self._feed(left)
                return
            except httptools.HttpParserUpgrade as asked:
                left = left[asked.args[0] :]
                head = self._head()
                self._begin()
                self._feed(head)


class LimitedHttpProtocol(HttpToolsProtocol):
    """Uvicorn's HTTP protocol, with limits on the size, the number of headers and the duration of
    requests. A request beyond a limit is refused before any middleware sees it; ``on_refusal`` is
    called with the error, so that it is counted."""

    def __init__(
        self,
        limits: ConnectionLimits,
        on_refusal: Callable[[RequestError], None],
        **uvicorn: Any,
    ) -> None:
        super().__init__(**uvicorn)
        self.parser = PersistentParser(self, self._plain_head)  # type: ignore[assignment]
        self._limits = limits
        self._on_refusal = on_refusal
        self._refusal: RequestError | None = None
        self._ignore_input = False
        """True if incoming bytes are discarded until the present answer has ended."""
        self._in_head = False
        self._in_request = False
        self._head = 0
        self._headers = 0
        self._overhead = 0  # received bytes of the request that are not its body
        self._body = 0
        self._clock: asyncio.TimerHandle | None = None
        self._began = 0.0
        self._reader_clock: asyncio.TimerHandle | None = None

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._lingering = LingeringTransport(
            transport, self.loop, unread=self._unread, linger_s=self._limits.linger_s
        )
        super().connection_made(self._lingering)
        if len(self.connections) > self._limits.max_connections:
            self._refuse(TooManyConnections("Too many connections.", retry_after_s=1.0))
        else:
            self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lingering.lost()
        self._stop_clock()
        self._stop_reader_clock()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._ignore_input or self.transport.is_closing():
            return  # discarded: see LingeringTransport
        self._overhead += len(data)
        super().data_received(data)
        if self._ignore_input or self.transport.is_closing():
            return
        if self._overhead > self._limits.max_head_bytes + _FRAMING * self._body:
            self._refuse(self._head_too_large())
        elif self._clock is None and self._idle:
            self._start_clock()  # bytes that begin no request do not keep a connection open

    # The parser

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_request = self._in_head = True
        self._head = self._headers = self._overhead = self._body = 0
        if self._clock is None:
            self._start_clock()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._head += len(url)
        if len(self.url) > self._limits.max_address_bytes:
            self._fail(AddressTooLong("The request's address is too long."))

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # a trailer, which the application cannot read
        super().on_header(name, value)
        self._headers += 1
        self._head += len(name) + len(value)
        if self._headers > self._limits.max_headers:
            self._fail(
                HeadersTooLarge(f"A request may have {self._limits.max_headers} headers at most.")
            )
        if self._head > self._limits.max_head_bytes:
            self._fail(self._head_too_large())

    def on_headers_complete(self) -> None:
        if self.parser.get_method() == b"CONNECT":
            self._fail(InvalidRequest("This server is no proxy."))
        if self.parser.should_upgrade():
            return  # the head comes once more
        super().on_headers_complete()
        self._in_head = False
        self._stop_clock()
        self._start_clock()

    def on_body(self, body: bytes) -> None:
        self._body += len(body)
        self._overhead -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._in_request = False
        self._stop_clock()
        super().on_message_complete()

    def _plain_head(self) -> bytes:
        """The present request's line and headers as bytes, without the header ``Upgrade``."""
        version = self.parser.get_http_version().encode()
        line = b" ".join((self.parser.get_method(), self.url, b"HTTP/" + version))
        fields = (b"%s: %s" % field for field in self.headers if field[0] != b"upgrade")
        return b"\r\n".join((line, *fields, b"", b""))

    def send_400_response(self, msg: str) -> None:
        """Answers a request that could not be parsed, or that was refused while it was parsed.
        Uvicorn calls this method when the parser has failed."""
        self._refuse(self._refusal or InvalidRequest("This is no HTTP request."))

    def _fail(self, refusal: RequestError) -> None:
        """Refuses the request while it is being parsed: raises the error ``refusal``, which stops
        the parser."""
        self._refusal = refusal
        raise refusal

    # The time limit of a request

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _idle(self) -> bool:
        return not self._in_request and not self._answering

    def _start_clock(self) -> None:
        self._began = self.loop.time()
        wait_s = self._limits.body_wait_s if self._in_body else self._limits.head_wait_s
        self._clock = self.loop.call_later(wait_s, self._time_is_up)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    @property
    def _in_body(self) -> bool:
        return self._in_request and not self._in_head

    def _time_is_up(self) -> None:
        self._clock = None
        if self.flow.read_paused:
            self._start_clock()
            return
        if self._in_body:
            allowed_s = self._limits.body_wait_s + self._body / self._limits.body_bytes_per_s
            left_s = self._began + allowed_s - self.loop.time()
            if left_s > 0:
                self._clock = self.loop.call_later(left_s, self._time_is_up)
                return
        if self._in_request:
            self._refuse(RequestTimeout("The request took too long to arrive."))
        else:
            self.transport.close()

    # The time limit for reading an answer

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._reader_clock is None:
            self._reader_clock = self.loop.call_later(
                self._limits.slow_reader_s, self._cut_slow_reader
            )

    def resume_writing(self) -> None:
        self._stop_reader_clock()
        super().resume_writing()

    def _cut_slow_reader(self) -> None:
        known = self.cycle.scope.get("state", {}) if self.cycle is not None else {}
        about = {"request_id": known.get("request_id")}
        self.logger.warning("connection cut: the client does not read its answer", extra=about)
        self.transport.abort()

    def _stop_reader_clock(self) -> None:
        if self._reader_clock is not None:
            self._reader_clock.cancel()
            self._reader_clock = None

    # Refusals

    def _unread(self) -> bool:
        """True if the client may still send bytes of a refused request, which are to be
        discarded."""
        return self._in_request or self.cycle is None

    def _head_too_large(self) -> HeadersTooLarge:
        return HeadersTooLarge(
            f"A request's address and headers may have {self._limits.max_head_bytes} bytes at most."
        )

    def _refuse(self, error: RequestError) -> None:
        """Refuses the present request: answers with the error, and closes the connection. The error
        is not sent if the answer has begun, or if earlier requests have not been answered yet."""
        self._stop_clock()
        self._on_refusal(error)
        if self._in_body:
            may_answer = self._answering and not self.cycle.response_started and not self.pipeline
        elif self._answering:
            self._ignore_input = True
            self.cycle.keep_alive = False
            return
        else:
            may_answer = True
        if may_answer:
            self.transport.write(_raw(error))
        if self._answering:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()


def _raw(error: RequestError) -> bytes:
    """The whole HTTP answer for an error, as bytes."""
    content = sse.encode(error.envelope()).encode()
    headers = error.headers() | {
        "content-type": "application/json",
        "content-length": str(len(content)),
        "connection": "close",
    }
    reason = HTTPStatus(error.status).phrase
    lines = [f"HTTP/1.1 {error.status} {reason}", *(f"{k}: {v}" for k, v in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + content
