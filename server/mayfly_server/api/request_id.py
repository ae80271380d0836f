"""Every request has an id: the client's own where it sent a harmless one. It comes back with the
answer, stands in every line that is logged on the way, and in ``scope["state"]``."""

from __future__ import annotations

import re
import secrets

import structlog
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bound_contextvars

from mayfly_server.api.anthropic.errors import speaks_anthropic

_log = structlog.get_logger(__name__)

_HARMLESS = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


def stamp(headers: MutableHeaders, scope: Scope) -> None:
    """Has an answer carry its request's id."""
    found: str = scope["state"]["request_id"]
    headers["x-request-id"] = found
    if speaks_anthropic(scope):
        headers["request-id"] = found


class RequestId:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = dict(scope["headers"]).get(b"x-request-id", b"")
        request_id = sent.decode() if _HARMLESS.fullmatch(sent) else f"req_{secrets.token_hex(12)}"
        scope.setdefault("state", {})["request_id"] = request_id

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                stamp(MutableHeaders(scope=message), scope)
            await send(message)

        with bound_contextvars(request_id=request_id):
            try:
                await self._app(scope, receive, with_id)
            except Exception:
                _log.exception("an error nobody foresaw")
                raise
