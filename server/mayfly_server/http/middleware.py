"""Small middleware that every request passes; :mod:`mayfly_server.http` draws the order of all."""

from __future__ import annotations

import re
import secrets
from urllib.parse import urlsplit, urlunsplit

import structlog
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bound_contextvars

from mayfly_server.errors import BodyTooLarge, RequestError
from mayfly_server.http.errors import add_headers, error_response
from mayfly_server.metrics import Metrics

NO_ROUTE = "none"
CLIENT_GONE = "499"
"""The status of a request whose client left before there was an answer, as proxies log it."""
_HARMLESS_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")

_log = structlog.get_logger(__name__)


class HttpMetrics:
    """Counts every HTTP request by its route and status, and by the error that refused it.

    A route is known only where routing got as far: a request that was refused before, or has no
    route, counts as ``none``. An address that a client made up is never a label. This is the
    outermost middleware.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = CLIENT_GONE

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except Exception:
            status = "500"
            raise
        finally:
            metrics: Metrics = scope["app"].state.front.metrics
            route = getattr(scope.get("route"), "path", NO_ROUTE)
            metrics.http_requests.labels(route, status).inc()
            refusal: RequestError | None = scope.get("state", {}).get("refusal")
            if refusal is not None:
                metrics.rejected(refusal)


class RequestId:
    """Gives every request an id: the client's own ``x-request-id`` if it is harmless, else a random
    one. The id comes back with the answer, stands in every log line of the request, and in
    ``scope["state"]``."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = dict(scope["headers"]).get(b"x-request-id", b"")
        request_id = (
            sent.decode() if _HARMLESS_ID.fullmatch(sent) else f"req_{secrets.token_hex(12)}"
        )
        scope.setdefault("state", {})["request_id"] = request_id

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                add_headers(MutableHeaders(scope=message), scope)
            await send(message)

        with bound_contextvars(request_id=request_id):
            try:
                await self._app(scope, receive, with_id)
            except Exception:
                _log.exception("unhandled exception")
                raise


class Expect100:
    """Closes the connection after an answer to a client that still waits to send its body
    (``Expect: 100-continue``).

    A client that gets its answer instead of being asked for the body may keep the body to itself
    and send its next request where the server still reads the body, or it may send it. The server
    cannot tell which (RFC 9110, 10.1.1), so such a connection ends with the answer.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _expects_100(scope):
            await self._app(scope, receive, send)
            return
        asked = False

        async def asking() -> Message:
            nonlocal asked
            asked = True
            return await receive()

        async def answering(message: Message) -> None:
            if message["type"] == "http.response.start" and not asked:
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        await self._app(scope, asking, answering)


def _expects_100(scope: Scope) -> bool:
    return any(
        name == b"expect" and value.lower() == b"100-continue" for name, value in scope["headers"]
    )


class BodyLimit:
    """Answers 413 to a request whose body is declared, or turns out to be, longer than ``limit``
    bytes. Bytes beyond the limit are never kept."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        too_large = BodyTooLarge(f"The body is longer than {self._limit} bytes.")
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if not declared.isdigit() or int(declared) > self._limit:
            await error_response(too_large, scope, close=True)(scope, receive, send)
            return
        length = 0

        async def counted() -> Message:
            nonlocal length
            message = await receive()
            length += len(message.get("body", b""))
            if length > self._limit:
                raise too_large
            return message

        await self._app(scope, counted, send)


class RelativeRedirects:
    """Makes the redirects of addresses with a slash too many relative.

    A server behind a proxy that ends TLS does not know that its clients speak HTTPS: a redirect to
    a whole address would send them, with their keys, to an unencrypted one.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not scope.get("path", "").endswith("/"):  # nearly all, and streams with them
            await self._app(scope, receive, send)
            return

        async def relative(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 307:
                headers = MutableHeaders(scope=message)
                target = urlsplit(headers["location"])
                headers["location"] = urlunsplit(("", "", target.path, target.query, ""))
            await send(message)

        await self._app(scope, receive, relative)
