"""Counts every HTTP request: by its route and status, and by which error it was refused with.

A route is known only where routing got as far: what was refused before, and what is at no route,
counts as ``none``. An address that a client made up is never a label.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mayfly_server.errors import RequestError
from mayfly_server.metrics import Metrics

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
