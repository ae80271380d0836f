"""Errors in Anthropic's shape.

::

    {"type": "error", "error": {"type": ..., "message": ...}, "request_id": ...}

The types are Anthropic's, and so is the status 529 for what OpenAI's API calls 429 or 503: the
server cannot take the request now, and may soon. What OpenAI calls ``code`` stands in
``error.details.error_code``.
"""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse
from starlette.types import Scope

from mayfly_server.errors import Overloaded, RequestError, Unavailable

PREFIX = "/v1/messages"
OVERLOADED = 529

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    OVERLOADED: "overloaded_error",
}


def speaks_anthropic(scope: Scope) -> bool:
    """Whether a request is for Anthropic's API, and its error to be in that shape."""
    path: str = scope["path"]
    return path == PREFIX or path.startswith(f"{PREFIX}/")


def request_id(scope: Scope) -> str:
    found: str = scope.get("state", {}).get("request_id", "")
    return found


def status_of(error: RequestError) -> int:
    return OVERLOADED if isinstance(error, Overloaded | Unavailable) else error.status


def error_object(error: RequestError, id: str) -> dict[str, Any]:
    status = status_of(error)
    kind = _TYPES.get(status) or ("api_error" if status >= 500 else "invalid_request_error")
    content: dict[str, Any] = {"type": kind, "message": error.message}
    if error.code is not None:
        content["details"] = {"error_code": error.code}
    return {"type": "error", "error": content, "request_id": id}


def anthropic_answer(error: RequestError, scope: Scope) -> JSONResponse:
    content = error_object(error, request_id(scope))
    return JSONResponse(content, status_of(error), error.headers())
