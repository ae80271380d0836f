"""Clients that wait with a body until it is asked for (``Expect: 100-continue``).

One that gets its answer instead may keep the body to itself, and send its next request where the
server still reads that body; or it may send it. Nobody can tell which (RFC 9110, 10.1.1), so such a
connection ends with the answer.
"""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send


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
