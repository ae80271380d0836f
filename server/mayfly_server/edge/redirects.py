"""Addresses with a slash too many are redirected to those without, at the same place: a server
behind a proxy that ends TLS does not know that its clients speak HTTPS, and where it named a whole
address it would send them, with their keys, to an unencrypted one.
"""

from __future__ import annotations

from urllib.parse import urlsplit, urlunsplit

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send


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
