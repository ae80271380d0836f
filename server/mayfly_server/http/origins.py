"""The ``Origin`` check, against requests that a browser sends on behalf of another site.

A page of any site may send a POST to any address, a loopback one included, as long as it looks
like a form's: with another content type than ours, or with none at all. The page cannot read the
answer, but it would have started the work. So a request that could change anything and whose
``Origin`` is elsewhere is refused with 403, whatever its key, unless that origin was configured. An
origin with the request's own ``Host`` is not elsewhere; ``null`` is.

Configured origins also get the CORS headers that let their pages read answers: never with
credentials, which no route of ours looks at.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from mayfly_server.errors import Forbidden
from mayfly_server.http.errors import IGNORED_HEADER, error_response

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Wraps an application in the CORS headers for these origins."""
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after", IGNORED_HEADER],
        allow_credentials=False,
    )


class OriginCheck:
    """Answers 403 to requests of foreign origins. ``allowed`` are whole origins
    (``https://example.com``); ``*`` allows all."""

    def __init__(self, app: ASGIApp, allowed: Sequence[str]) -> None:
        self._app = app
        self._allowed = frozenset(origin.encode() for origin in allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._foreign(scope):
            refused = Forbidden(
                "Requests of this origin are not taken; --cors-origins lets it in.",
                code="origin_not_allowed",
            )
            await error_response(refused, scope, close=True)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _foreign(self, scope: Scope) -> bool:
        if scope["method"] in _SAFE_METHODS or b"*" in self._allowed:
            return False
        headers = dict(scope["headers"])
        origin = headers.get(b"origin")
        if origin is None or origin in self._allowed:
            return False
        host = headers.get(b"host", b"").lower()
        return not host or origin.lower().partition(b"://")[2] != host
