"""Errors in Anthropic's shape.

::

    {"type": "error", "error": {"type": ..., "message": ...}, "request_id": ...}

The types are Anthropic's, and so is the status 529 for what OpenAI's API calls 429 or 503: the
server cannot take the request now, and may soon. What OpenAI calls ``code`` stands in
``error.details.error_code``.

Every request has an id: the client's own where it sent a harmless one. It comes back with the
answer, stands in every line that is logged on the way, and in ``scope["state"]``.

Errors as HTTP: one envelope for whatever refuses a request, FastAPI and Starlette included.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Any

import structlog
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bound_contextvars

from mayfly_server.errors import InvalidRequest, Overloaded, RequestError, Unavailable

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


FIELD_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")

UNDER_V1 = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/models",
    "/v1/responses",
)
"""What clients put together from a base URL and an address of their own."""

_CODES = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "unsupported": "unsupported_parameter",
    "too_short": "empty_array",
}


def answer(error: RequestError, scope: Scope, *, close: bool = False) -> JSONResponse:
    """An error in the shape of the API that the request is for. ``close`` where the rest of the
    request is not going to be read. ``scope["state"]`` keeps it to be counted."""
    scope.setdefault("state", {})["refusal"] = error
    if speaks_anthropic(scope):
        response = anthropic_answer(error, scope)
    else:
        response = JSONResponse(error.envelope(), error.status, error.headers())
    if close:
        response.headers["connection"] = "close"
    return response


def install(app: FastAPI) -> None:
    """Makes every error of an application one of the family."""

    @app.exception_handler(RequestError)
    async def known(request: Request, error: RequestError) -> JSONResponse:
        return answer(error, request.scope, close=error.status == 413)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return answer(refusal(error.errors(), error.body), request.scope)

    @app.exception_handler(HTTPException)
    async def routing(request: Request, error: HTTPException) -> JSONResponse:
        response = answer(_of_status(error, request), request.scope)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # nobody reads it; proxies log this number

    @app.exception_handler(Exception)
    async def unknown(request: Request, error: Exception) -> JSONResponse:
        # Starlette raises it again after this answer; Uvicorn logs it and closes the connection.
        response = answer(internal_error(), request.scope, close=True)
        stamp(response.headers, request.scope)  # it is made outside of all middleware
        return response


def internal_error() -> RequestError:
    """What a client is told of an exception that nobody foresaw."""
    return RequestError("The server met an error of its own.", code="internal_error")


def refusal(found: Sequence[Any], body: Any = None) -> InvalidRequest:
    """What a client reads of pydantic's findings about its body: the first one, and which field it
    is about."""
    first = found[0]
    param = field_path(_place(first, body))
    place = f"{param}: " if param else ""
    return InvalidRequest(f"{place}{_problem(first)}.", param=param, code=_CODES.get(first["type"]))


def _problem(error: Any) -> str:
    """Pydantic's words, unless they repeat the client's."""
    if error["type"] == "union_tag_invalid":
        return f"The type should be one of {error['ctx']['expected_tags']}"
    if error["type"] == "extra_forbidden":
        return "There is no such field"
    if error["type"] == "union_tag_not_found":
        return "An object with a type is needed here"
    problem: str = error["msg"]
    return problem


def _place(error: Any, body: Any) -> list[str | int]:
    """Where in the body the error is: pydantic's location without the names of a union's members,
    which are no fields."""
    location = error["loc"][1:]
    here, place = body, []
    for number, part in enumerate(location, start=1):
        last = number == len(location)
        try:
            inner = here[part]
        except (TypeError, LookupError):
            if error["type"] == "missing" and last:
                place.append(part)
            continue
        if (
            not last
            and isinstance(here, dict)
            and part == here.get("type")
            and not isinstance(inner, dict | list)
        ):
            continue  # a block of type text has a field of that name
        here = inner
        place.append(part)
    if error["type"] in ("union_tag_invalid", "union_tag_not_found"):
        place.append("type")
    return place


def field_path(parts: Sequence[str | int]) -> str | None:
    """``("messages", 0, "content")`` as ``messages[0].content``. A name that no field of ours
    could have came from the client, and is not repeated."""
    path = ""
    for part in parts:
        if isinstance(part, int):
            path += f"[{part}]"
        elif FIELD_NAME.fullmatch(part):
            path += f".{part}" if path else part
        else:
            path += ".?" if path else "?"
    return path or None


def _of_status(error: HTTPException, request: Request) -> RequestError:
    if error.status_code == 404:
        meant = _meant(request)
        hint = f"; did you mean {meant}?" if meant else "."
        failure: RequestError = InvalidRequest(
            f"There is nothing at this address{hint}", code="not_found"
        )
    elif error.status_code == 405:
        failure = InvalidRequest("This address does not take that method.", code="bad_method")
    else:
        failure = InvalidRequest("The request could not be read.")
    failure.status = error.status_code
    return failure


def _meant(request: Request) -> str | None:
    """Some clients take a base URL with /v1, others without, and people can't know."""
    path: str = request.scope["path"]
    for address in UNDER_V1:
        if path in (address.removeprefix("/v1"), f"/v1{address}"):
            return address
    return None
