"""Authentication: which paths need an API key, and the middleware that asks for it.

================================  ============================================================
path                              with any key configured
================================  ============================================================
``/livez`` ``/readyz`` ``/health``  open; a caller without a key is told "ok" or "unavailable" only
``/`` ``/page/...``               open: the files of the live page, which say nothing of the server
``/metrics``                      an admin's key, or open if the operator says so
``/mayfly/...`` ``/openapi.json``   an admin's key
every other, existing or not      any key
================================  ============================================================

The table goes by path alone, so that a route that is added needs a key until somebody opens it.
Without any key configured everything is open, and the server listens on the loopback interface
only.
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
    """A path's demand: no key, any key, or an admin's."""

    OPEN = "open"
    KEY = "key"
    ADMIN = "admin"


def access_to(path: str, metrics: MetricsAccess, open_paths: Collection[str] = ()) -> Access:
    """The access that a path needs once keys are configured. ``open_paths`` are open beside the
    probes."""
    if path in PROBES or path in open_paths or (path == "/metrics" and metrics == "open"):
        return Access.OPEN
    if path in ("/metrics", "/openapi.json") or path.startswith("/mayfly/"):
        return Access.ADMIN
    return Access.KEY


def presented_keys(scope: Scope) -> Iterator[str]:
    """The keys that a request carries, as OpenAI's clients send them (``Authorization: Bearer``)
    or as Anthropic's do (``x-api-key``). A key in the address does not count: it would end up in
    logs."""
    for name, value in scope["headers"]:
        if name == b"x-api-key":
            yield value.decode("latin-1").strip()
        elif name == b"authorization":
            scheme, _, credentials = value.decode("latin-1").partition(" ")
            if scheme.lower() == "bearer":
                yield credentials.strip()


class AuthMiddleware:
    """Answers 401, 403 or 429 to requests that lack the key they need or exceed its limits.

    ``scope["state"]["guest"]`` tells the probes that the caller has no key, ``["tenant"]`` tells
    every other route the name of the caller's key.
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
            # What is left of the body is not worth reading.
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
        """Counts a request that may go on. Raises Unauthorized, Forbidden or RateLimited if it may
        not; ``given`` says whether it carried any key."""
        if key is None:
            raise Unauthorized(
                "This API key is not known here."
                if given
                else "An API key is needed, as in Authorization: Bearer KEY."
            )
        if access is Access.ADMIN and not key.admin:
            raise Forbidden("This needs an admin's key.")
        self._quotas.enter(key, time.monotonic())
