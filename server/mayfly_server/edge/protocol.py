"""Bounds on what a connection costs before anything knows what it wants.

Uvicorn's parser bounds neither the number nor the size of headers, nor the time that a request
takes to arrive, nor how long an answer may lie unread. Here it does::

                     accept                     too many connections: 503
                       |
        +------------> |  first byte, or none
        |              v
        |            HEAD      head_wait_s           : 408
        |              |       bytes, headers, address: 431, 431, 414
        |              v
        |            BODY      body_wait_s, and a second more for each body_bytes_per_s: 408
        |              |       (how long it may be is api.body's affair)
        |              v
        |            ANSWER    unread for slow_reader_s: cut
        | keep-alive   |
        +--------------+

The clock of HEAD and BODY stands still while the server itself does not read, as with a request
that comes in behind one that is being answered. What comes there and is no request, or does not
become one, costs nobody an answer: the connection ends after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from mayfly_server.api import sse
from mayfly_server.config import ConnectionLimits
from mayfly_server.edge.parsing import PersistentParser
from mayfly_server.edge.transport import LingeringTransport
from mayfly_server.errors import (
    AddressTooLong,
    HeadersTooLarge,
    InvalidRequest,
    RequestError,
    RequestTimeout,
    TooManyConnections,
)

_FRAMING = 8
"""Bytes that may come beside each byte of a body: chunks of one byte have five."""


class EdgeProtocol(HttpToolsProtocol):
    """``refused`` is told of every refusal here: no application will ever see the request."""

    def __init__(
        self,
        limits: ConnectionLimits,
        refused: Callable[[RequestError], None],
        **uvicorn: Any,
    ) -> None:
        super().__init__(**uvicorn)
        self.parser = PersistentParser(self, self._plain_head)  # type: ignore[assignment]
        self._limits = limits
        self._refused = refused
        self._refusal: RequestError | None = None
        self._deaf = False
        """Whether nothing that comes is looked at any more: only an answer goes on."""
        self._in_head = False
        self._in_request = False
        self._head = 0
        self._headers = 0
        self._beside = 0  # bytes of the request that were no body, about
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
        if self._deaf or self.transport.is_closing():
            return  # read and forgotten: see LingeringTransport
        self._beside += len(data)
        super().data_received(data)
        if self._deaf or self.transport.is_closing():
            return
        if self._beside > self._limits.max_head_bytes + _FRAMING * self._body:
            self._refuse(self._head_too_large())
        elif self._clock is None and self._idle:
            self._start_clock()  # bytes that begin no request are no reason to stay

    # The parser

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_request = self._in_head = True
        self._head = self._headers = self._beside = self._body = 0
        if self._clock is None:
            self._start_clock()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._head += len(url)
        if len(self.url) > self._limits.max_address_bytes:
            self._fail(AddressTooLong("The request's address is too long."))

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # a trailer, which nobody reads
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
        self._beside -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._in_request = False
        self._stop_clock()
        super().on_message_complete()

    def _plain_head(self) -> bytes:
        """The present request's, without a wish for another protocol."""
        version = self.parser.get_http_version().encode()
        line = b" ".join((self.parser.get_method(), self.url, b"HTTP/" + version))
        fields = (b"%s: %s" % field for field in self.headers if field[0] != b"upgrade")
        return b"\r\n".join((line, *fields, b"", b""))

    def send_400_response(self, msg: str) -> None:
        """What Uvicorn calls when the parser has given up."""
        self._refuse(self._refusal or InvalidRequest("This is no HTTP request."))

    def _fail(self, refusal: RequestError) -> None:
        """Makes the parser give up."""
        self._refusal = refusal
        raise refusal

    # The clock of a request

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _idle(self) -> bool:
        return not self._in_request and not self._answering

    def _start_clock(self) -> None:
        self._began = self.loop.time()
        wait_s = self._limits.body_wait_s if self._in_body else self._limits.head_wait_s
        self._clock = self.loop.call_later(wait_s, self._rang)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    @property
    def _in_body(self) -> bool:
        return self._in_request and not self._in_head

    def _rang(self) -> None:
        self._clock = None
        if self.flow.read_paused:
            self._start_clock()
            return
        if self._in_body:
            allowed_s = self._limits.body_wait_s + self._body / self._limits.body_bytes_per_s
            left_s = self._began + allowed_s - self.loop.time()
            if left_s > 0:
                self._clock = self.loop.call_later(left_s, self._rang)
                return
        if self._in_request:
            self._refuse(RequestTimeout("The request took too long to arrive."))
        else:
            self.transport.close()

    # The clock of a reader

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._reader_clock is None:
            self._reader_clock = self.loop.call_later(self._limits.slow_reader_s, self._unread_long)

    def resume_writing(self) -> None:
        self._stop_reader_clock()
        super().resume_writing()

    def _unread_long(self) -> None:
        known = self.cycle.scope.get("state", {}) if self.cycle is not None else {}
        about = {"request_id": known.get("request_id")}
        self.logger.warning("cut a client that does not read its answer", extra=about)
        self.transport.abort()

    def _stop_reader_clock(self) -> None:
        if self._reader_clock is not None:
            self._reader_clock.cancel()
            self._reader_clock = None

    # Refusals

    def _unread(self) -> bool:
        """Whether the client may still be sending what nobody will look at."""
        return self._in_request or self.cycle is None

    def _head_too_large(self) -> HeadersTooLarge:
        return HeadersTooLarge(
            f"A request's address and headers may have {self._limits.max_head_bytes} bytes at most."
        )

    def _refuse(self, error: RequestError) -> None:
        """Answers on the connection itself, if it is this request's turn and nothing was said
        yet, and closes it."""
        self._stop_clock()
        self._refused(error)
        if self._in_body:
            silent = self._answering and not self.cycle.response_started and not self.pipeline
        elif self._answering:
            self._deaf = True
            self.cycle.keep_alive = False
            return
        else:
            silent = True
        if silent:
            self.transport.write(_raw(error))
        if self._answering:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()


def _raw(error: RequestError) -> bytes:
    """A whole answer."""
    content = sse.encode(error.envelope()).encode()
    headers = error.headers() | {
        "content-type": "application/json",
        "content-length": str(len(content)),
        "connection": "close",
    }
    reason = HTTPStatus(error.status).phrase
    lines = [f"HTTP/1.1 {error.status} {reason}", *(f"{k}: {v}" for k, v in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + content
