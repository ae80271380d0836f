"""Which requests need a key, and which key.

================================  ============================================================
path                              with any key configured
================================  ============================================================
``/livez`` ``/readyz`` ``/health``  open; a caller without a key is told "ok" or "unavailable" only
``/`` ``/page/...``               open: the files of the live page, which say nothing of the server
``/metrics``                      an admin's key, or open if the operator says so
``/mayfly/...`` ``/openapi.json``   an admin's key
every other, existing or not      any key
================================  ============================================================

The table goes by path alone, so that a route that is added is closed until somebody opens it.
Without any key configured everything is open, and the server listens on the loopback interface
only (:mod:`mayfly_server.http.auth`).

Counts every HTTP request: by its route and status, and by which error it was refused with.

A route is known only where routing got as far: what was refused before, and what is at no route,
counts as ``none``. An address that a client made up is never a label.

Clients that wait with a body until it is asked for (``Expect: 100-continue``).

One that gets its answer instead may keep the body to itself, and send its next request where the
server still reads that body; or it may send it. Nobody can tell which (RFC 9110, 10.1.1), so such a
connection ends with the answer.

Addresses with a slash too many are redirected to those without, at the same place: a server
behind a proxy that ends TLS does not know that its clients speak HTTPS, and where it named a whole
address it would send them, with their keys, to an unencrypted one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from enum import Enum
from urllib.parse import urlsplit, urlunsplit

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bound_contextvars

from mayfly_server.api.admin import page
from mayfly_server.errors import Forbidden, RateLimited, RequestError, Unauthorized
from mayfly_server.http.auth import Key, Keyring
from mayfly_server.http.errors import answer
from mayfly_server.http.rate_limit import Quotas
from mayfly_server.metrics import Metrics
from mayfly_server.settings import MetricsAccess

NO_ROUTE = "none"
GONE = "499"
"""The status of a request whose client left before there was an answer, as proxies log it."""


class Counting:
    """Middleware, outside of all others."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = GONE

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


class Expectations:
    """Middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _expects(scope):
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


def _expects(scope: Scope) -> bool:
    return any(
        name == b"expect" and value.lower() == b"100-continue" for name, value in scope["headers"]
    )


class Redirects:
    """Middleware."""

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


PROBES = frozenset({"/livez", "/readyz", "/health"})


class Access(Enum):
    OPEN = "open"
    KEY = "key"
    ADMIN = "admin"


def access_to(path: str, metrics: MetricsAccess) -> Access:
    """What a request for this path needs once there are keys."""
    if path in PROBES or path in page.PATHS or (path == "/metrics" and metrics == "open"):
        return Access.OPEN
    if path in ("/metrics", "/openapi.json") or path.startswith("/mayfly/"):
        return Access.ADMIN
    return Access.KEY


def presented(scope: Scope) -> Iterator[str]:
    """The keys that a request carries, as OpenAI's clients send them (``Authorization: Bearer``)
    or as Anthropic's do (``x-api-key``). A key in the address would end up in logs: it is none."""
    for name, value in scope["headers"]:
        if name == b"x-api-key":
            yield value.decode("latin-1").strip()
        elif name == b"authorization":
            scheme, _, credentials = value.decode("latin-1").partition(" ")
            if scheme.lower() == "bearer":
                yield credentials.strip()


class Gate:
    """Middleware. ``scope["state"]["guest"]`` says to the probes that the caller has no key,
    ``["tenant"]`` to every other route whose key it is."""

    def __init__(self, app: ASGIApp, keyring: Keyring, metrics: MetricsAccess) -> None:
        self._app = app
        self._keyring = keyring
        self._metrics = metrics
        self._quotas = Quotas()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._keyring.locked:
            await self._app(scope, receive, send)
            return
        given = [key for key in presented(scope) if key]
        key = self._keyring.find(given)
        access = access_to(scope["path"], self._metrics)
        if access is Access.OPEN:
            scope.setdefault("state", {})["guest"] = key is None
            await self._app(scope, receive, send)
            return
        try:
            self._admit(key, access, given=bool(given))
        except (Unauthorized, Forbidden, RateLimited) as refused:
            # What is left of the body is not worth reading.
            await answer(refused, scope, close=True)(scope, receive, send)
            return
        assert key is not None
        scope.setdefault("state", {})["tenant"] = key.name
        try:
            with bound_contextvars(key=key.name):
                await self._app(scope, receive, send)
        finally:
            self._quotas.leave(key)

    def _admit(self, key: Key | None, access: Access, *, given: bool) -> None:
        if key is None:
            raise Unauthorized(
                "This API key is not known here."
                if given
                else "An API key is needed, as in Authorization: Bearer KEY."
            )
        if access is Access.ADMIN and not key.admin:
            raise Forbidden("This needs an admin's key.")
        self._quotas.enter(key, time.monotonic())
