"""The check of the ``Origin`` header, against requests that a browser sends for another site's
page.

A page of any web site can make the browser send a POST to any address, even a loopback address, if
the request looks like a form's: with a content type other than JSON, or none. The page cannot read
the answer, but the server would do the work. So requests with methods other than GET, HEAD and
OPTIONS are refused with 403, whatever their API key, if their ``Origin`` is foreign: neither
configured nor equal to the request's own ``Host``. ``null`` counts as foreign. Of requests without
an ``Origin``, those are refused whose ``Sec-Fetch-Site`` says that another site's page sent them.

Configured origins also get the CORS headers that let their pages read answers. Credentials
(cookies) are never allowed, since no route of this server uses them.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from mayfly_server.errors import Forbidden
from mayfly_server.http.errors import IGNORED_HEADER, error_response

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_OTHER_SITES = frozenset({b"cross-site", b"same-site"})
"""Values of ``Sec-Fetch-Site`` in requests of a page with another origin; ``same-origin`` and
``none`` (typed by the user) are the others."""


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Wraps an application so that its answers have the CORS headers that let pages of these
    origins read them."""
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after", IGNORED_HEADER],
        allow_credentials=False,
    )


class OriginCheck:
    """Middleware that answers 403 to requests which a browser sends for a page of another site.
    ``allowed`` are whole origins, such as ``https://example.com``; ``*`` allows all."""

    def __init__(self, app: ASGIApp, allowed: Sequence[str]) -> None:
        self._app = app
        self._allowed = frozenset(origin.encode() for origin in allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._foreign(scope):
            refused = Forbidden(
                "Requests from pages of this origin are refused; --cors-origins allows the origin.",
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
        if origin is None:
            return headers.get(b"sec-fetch-site") in _OTHER_SITES
        if origin in self._allowed:
            return False
        host = headers.get(b"host", b"").lower()
        return not host or origin.lower().partition(b"://")[2] != host
