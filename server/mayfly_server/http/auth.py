"""Authentication of clients: the paths that need an API key, and the middleware that checks it.

================================  ============================================================
path                              access if any API key is configured
================================  ============================================================
``/livez`` ``/readyz`` ``/health``  open; without a key, the answer is only "ok" or "unavailable"
``/`` ``/page/...``               open: the status page's files, which hold no data of the server
``/metrics``                      an admin's key, or open if the setting ``metrics`` is ``open``
``/mayfly/...`` ``/openapi.json``   an admin's key
every other path, even unknown    any key
================================  ============================================================

The table goes by the path alone, so that a route added later needs a key unless it is listed here.
If no key is configured, every path is open, and the server listens on the loopback interface only.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from enum import Enum

from starlette.types import ASGIApp, Receive, Scope, Send
from structlog.contextvars import bound_contextvars

from mayfly_server.errors import Forbidden, RateLimited, Unauthorized
from mayfly_server.http.api_keys import Key, Keyring
from mayfly_server.http.errors import error_response
from mayfly_server.http.rate_limit import Quotas
from mayfly_server.settings import MetricsAccess

PROBES = frozenset({"/livez", "/readyz", "/health"})


class Access(Enum):
    """The access to a path: open to everyone, with any API key, or with an admin's key."""

    OPEN = "open"
    KEY = "key"
    ADMIN = "admin"


def access_to(path: str, metrics: MetricsAccess, open_paths: Collection[str] = ()) -> Access:
    """Returns whether a path is open, needs any API key or needs an admin's key, if keys are
    configured. ``metrics`` decides whether ``/metrics`` is open; the paths ``open_paths`` are open,
    as the health probes are."""
    if path in PROBES or path in open_paths or (path == "/metrics" and metrics == "open"):
        return Access.OPEN
    if path in ("/metrics", "/openapi.json") or path.startswith("/mayfly/"):
        return Access.ADMIN
    return Access.KEY


def presented_keys(scope: Scope) -> Iterator[str]:
    """Yields the API keys in a request's headers: ``Authorization: Bearer``, as OpenAI's clients
    send it, and ``x-api-key``, as Anthropic's do. A key in the URL is ignored, because URLs end up
    in logs."""
    for name, value in scope["headers"]:
        if name == b"x-api-key":
            yield value.decode("latin-1").strip()
        elif name == b"authorization":
            scheme, _, credentials = value.decode("latin-1").partition(" ")
            if scheme.lower() == "bearer":
                yield credentials.strip()


class AuthMiddleware:
    """Middleware that answers 401, 403 or 429 to requests without the necessary API key, or beyond
    the key's limits.

    For the routes it sets ``scope["state"]["guest"]``, which is True if a request to a health probe
    has no key, and ``scope["state"]["tenant"]``, the name of the request's key.
    """

    def __init__(
        self, app: ASGIApp, keyring: Keyring, metrics: MetricsAccess, open_paths: Collection[str]
    ) -> None:
        self._app = app
        self._keyring = keyring
        self._metrics = metrics
        self._open_paths = open_paths
        self._quotas = Quotas()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._keyring.required:
            await self._app(scope, receive, send)
            return
        given = [key for key in presented_keys(scope) if key]
        key = self._keyring.find(given)
        access = access_to(scope["path"], self._metrics, self._open_paths)
        if access is Access.OPEN:
            scope.setdefault("state", {})["guest"] = key is None
            await self._app(scope, receive, send)
            return
        try:
            self._admit(key, access, given=bool(given))
        except (Unauthorized, Forbidden, RateLimited) as refused:
            # The connection is closed: the rest of the body is not worth reading.
            await error_response(refused, scope, close=True)(scope, receive, send)
            return
        assert key is not None
        scope.setdefault("state", {})["tenant"] = key.name
        try:
            with bound_contextvars(key=key.name):
                await self._app(scope, receive, send)
        finally:
            self._quotas.leave(key)

    def _admit(self, key: Key | None, access: Access, *, given: bool) -> None:
        """Counts a request against its key's limits. Raises Unauthorized if ``key`` is None,
        Forbidden if the path needs an admin's key and this is none, or RateLimited if the key has
        reached a limit. ``given`` is True if the request had any key, even an unknown one."""
        if key is None:
            raise Unauthorized(
                "This API key is not known here."
                if given
                else "An API key is needed, as in Authorization: Bearer KEY."
            )
        if access is Access.ADMIN and not key.admin:
            raise Forbidden("This needs an admin's key.")
        self._quotas.enter(key, time.monotonic())
