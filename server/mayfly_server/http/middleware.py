"""Small ASGI middleware that every HTTP request passes: metrics, request ids, body limit,
redirects."""

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
"""Status counted for a request whose client disconnected before it was answered. Proxies log this
number, too."""
_HARMLESS_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")

_log = structlog.get_logger(__name__)


class HeadAsGet:
    """Middleware that answers HEAD as GET without the body. All other middleware and the routes see
    a GET.

    The answer ends with its headers, even if the answer to GET is a stream without an end.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def headers_only(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        await self._app({**scope, "method": "GET"}, receive, headers_only)


class HttpMetrics:
    """Middleware that counts every HTTP request by route and status, and by the error that refused
    it.

    The route is ``none`` for requests that were refused before routing, and for paths without a
    route, so that clients cannot create new label values. Of all middleware, only HeadAsGet comes
    before this one.
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
    """Middleware that gives every request an id: the client's ``x-request-id`` if it has only
    harmless characters, otherwise a random id. The id is a header of the answer and a field of
    every log line about the request; routes find it in ``scope["state"]["request_id"]``."""

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
                _log.exception("unhandled exception while a request was answered")
                raise


class Expect100:
    """Middleware that closes the connection if a client with ``Expect: 100-continue`` got its
    answer before the server asked for the request's body.

    Such a client may still send the body, or send its next request instead. The server cannot tell
    which of these the next bytes are (RFC 9110, 10.1.1), so it ends the connection.
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
    """Middleware that answers 413 to a request whose body is longer than ``limit`` bytes, by its
    Content-Length or as counted while it arrives. Bytes beyond the limit are not kept in memory."""

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
    """Middleware that makes Starlette's redirects of paths with a superfluous final slash relative.

    A server behind a proxy that terminates TLS does not know that its clients use HTTPS: a redirect
    to an absolute URL would send the clients, with their API keys, to an unencrypted address.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not scope.get("path", "").endswith(
            "/"
        ):  # true of nearly all requests, and of all streams
            await self._app(scope, receive, send)
            return

        async def relative(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 307:
                headers = MutableHeaders(scope=message)
                target = urlsplit(headers["location"])
                headers["location"] = urlunsplit(("", "", target.path, target.query, ""))
            await send(message)

        await self._app(scope, receive, relative)
