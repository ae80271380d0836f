"""Errors as HTTP answers: all errors, FastAPI's and Starlette's included, get one of two shapes.

Requests to OpenAI's API get :meth:`mayfly_server.errors.RequestError.envelope`. Requests to
Anthropic's API get::

    {"type": "error", "error": {"type": ..., "message": ...}, "request_id": ...}

``type`` is one of Anthropic's error types. Anthropic's status 529 replaces 429 and 503 if the
server cannot take the request now but may soon. OpenAI's ``code`` is put into
``error.details.error_code``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, NotRequired

import structlog
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ConfigDict, with_config
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Scope
from typing_extensions import TypedDict

from mayfly_protocol.common.logs import redacted
from mayfly_server.errors import (
    ContextExceeded,
    InvalidRequest,
    Overloaded,
    RequestError,
    RequestFailed,
    ThreadUnsupported,
    Unavailable,
)

_log = structlog.get_logger(__name__)

PREFIX = "/v1/messages"
OVERLOADED = 529
IGNORED_HEADER = "mayfly-ignored"
MAX_NAMED = 16
"""Largest number of ignored request fields that the header ``mayfly-ignored`` of an answer
names."""

AnthropicErrorType = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "timeout_error",
    "rate_limit_error",
    "overloaded_error",
    "api_error",
]


@with_config(ConfigDict(extra="forbid"))
class AnthropicErrorDetails(TypedDict):
    error_code: str
    unsupported: NotRequired[list[str]]


@with_config(ConfigDict(extra="forbid"))
class AnthropicErrorObject(TypedDict):
    type: AnthropicErrorType
    message: str
    details: NotRequired[AnthropicErrorDetails]


@with_config(ConfigDict(extra="forbid"))
class AnthropicErrorAnswer(TypedDict):
    type: Literal["error"]
    error: AnthropicErrorObject
    request_id: str


_TYPES: dict[int, AnthropicErrorType] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    OVERLOADED: "overloaded_error",
}


def speaks_anthropic(scope: Scope) -> bool:
    """True if a request is for Anthropic's API, so that its errors need Anthropic's shape."""
    path: str = scope["path"]
    return path == PREFIX or path.startswith(f"{PREFIX}/")


def request_id(scope: Scope) -> str:
    """The id of a request; empty if the middleware RequestId has not set it yet."""
    found: str = scope.get("state", {}).get("request_id", "")
    return found


def add_headers(headers: MutableHeaders, scope: Scope) -> None:
    """Puts a request's id, and the names of the fields that were ignored, into the headers of its
    answer."""
    found: str = scope["state"]["request_id"]
    headers["x-request-id"] = found
    if speaks_anthropic(scope):
        headers["request-id"] = found
    ignored: list[str] = scope["state"].get("ignored", [])
    if ignored:
        more = ["..."] if len(ignored) > MAX_NAMED else []
        headers[IGNORED_HEADER] = ", ".join(ignored[:MAX_NAMED] + more)


def anthropic_status(error: RequestError) -> int:
    """The HTTP status of an error in Anthropic's API."""
    return OVERLOADED if isinstance(error, Overloaded | Unavailable) else error.status


def _anthropic_message(error: RequestError) -> str:
    """The message of an error; a place in the body, such as ``messages[0].content``, is written as
    Anthropic does, ``messages.0.content``: agents look for some of these."""
    place = error.param or ""
    if place and error.message.startswith(place):
        return re.sub(r"\[(\d+)\]", r".\1", place) + error.message[len(place) :]
    return error.message


def anthropic_error(error: RequestError, id: str) -> AnthropicErrorAnswer:
    """The JSON object of an error in Anthropic's shape; ``id`` is the id of the request."""
    status = anthropic_status(error)
    kind = _TYPES.get(status) or ("api_error" if status >= 500 else "invalid_request_error")
    content: AnthropicErrorObject = {"type": kind, "message": _anthropic_message(error)}
    if isinstance(error, ContextExceeded):  # agents look for this sentence to shorten their prompt
        content["message"] = f"prompt is too long: {error.tokens} tokens > {error.context} maximum"
    if error.code is not None:
        content["details"] = {"error_code": error.code}
    if isinstance(error, ThreadUnsupported):
        content["details"] = {"error_code": error.code or "", "unsupported": ["thread"]}
    return {"type": "error", "error": content, "request_id": id}


FIELD_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")

UNDER_V1 = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages/count_tokens",
    "/v1/messages",
    "/v1/models",
    "/v1/responses",
)
"""The API's paths, to which a mistyped path is compared by its ending. ``/v1/chat/completions``
comes before ``/v1/completions``, since its ending fits both."""

_OLLAMA_PATHS = {
    "api/chat": "/v1/chat/completions",
    "api/generate": "/v1/completions",
    "api/show": "/v1/models",
    "api/tags": "/v1/models",
}

_CODES = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "unsupported": "unsupported_parameter",
    "too_short": "empty_array",
}


def error_response(error: RequestError, scope: Scope, *, close: bool = False) -> JSONResponse:
    """Makes the HTTP answer for an error, in the shape of the API that the request is for.

    With ``close``, the connection ends after the answer, because the rest of the request is not
    going to be read. The error is kept in ``scope["state"]["refusal"]``, where the middleware
    HttpMetrics finds and counts it.
    """
    scope.setdefault("state", {})["refusal"] = error
    log_failure(error)
    if speaks_anthropic(scope):
        content = anthropic_error(error, request_id(scope))
        response = JSONResponse(content, anthropic_status(error), error.headers())
    else:
        response = JSONResponse(error.envelope(), error.status, error.headers())
    if close:
        response.headers["connection"] = "close"
    return response


def log_failure(error: RequestError) -> None:
    """Logs that a request failed, if the request itself made the model or its workers fail.
    Unhandled exceptions of the server, the other errors with status 500, are logged where they are
    caught."""
    if isinstance(error, RequestFailed):
        cause = redacted(error.cause).partition("\n")[0] or error.message
        _log.error("request failed", kind=error.code, first_cause=cause)


def install_handlers(app: FastAPI) -> None:
    """Installs exception handlers, so that the application answers every exception with the JSON of
    a :class:`RequestError`."""

    @app.exception_handler(RequestError)
    async def known(request: Request, error: RequestError) -> JSONResponse:
        return error_response(error, request.scope, close=error.status == 413)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        failure = validation_error(
            error.errors(), error.body, anthropic=speaks_anthropic(request.scope)
        )
        return error_response(failure, request.scope)

    @app.exception_handler(HTTPException)
    async def routing(request: Request, error: HTTPException) -> JSONResponse:
        response = error_response(_routing_error(error, request), request.scope)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # nobody reads it; proxies log this number

    @app.exception_handler(Exception)
    async def unknown(request: Request, error: Exception) -> JSONResponse:
        # Starlette raises it again after this answer; Uvicorn logs it and closes the connection.
        response = error_response(internal_error(), request.scope, close=True)
        add_headers(response.headers, request.scope)  # this answer passes no middleware
        return response


def internal_error() -> RequestError:
    """The error that a client gets for an unhandled exception of the server."""
    return RequestError("The server met an error of its own.", code="internal_error")


def validation_error(
    found: Sequence[Any], body: Any = None, *, anthropic: bool = False
) -> InvalidRequest:
    """Makes the error for a body that pydantic found invalid, from the first problem in ``found``;
    ``anthropic`` says that the client knows the words of Anthropic's API."""
    first = found[0]
    param = field_path(_place(first, body))
    place = f"{param}: " if param else ""
    problem = _problem(first, anthropic=anthropic)
    return InvalidRequest(f"{place}{problem}.", param=param, code=_CODES.get(first["type"]))


def _problem(error: Any, *, anthropic: bool) -> str:
    """The text of one of pydantic's problems. Messages that would repeat the client's text are
    replaced."""
    if error["type"] == "union_tag_invalid":
        return f"The type should be one of {error['ctx']['expected_tags']}"
    if error["type"] == "extra_forbidden" and not anthropic:  # Anthropic's words are pydantic's
        return "There is no such field"
    if error["type"] == "union_tag_not_found":
        return "An object with a type is needed here"
    problem: str = error["msg"]
    return problem


def _place(error: Any, body: Any) -> list[str | int]:
    """The path of the wrong field in the body: pydantic's location without the names of the members
    of unions, which are not fields."""
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
            continue  # a content block of type "text" has a field "text"
        here = inner
        place.append(part)
    if error["type"] in ("union_tag_invalid", "union_tag_not_found"):
        place.append("type")
    return place


def field_path(parts: Sequence[str | int]) -> str | None:
    """Writes the path of a field, as in ``messages[0].content``; None if it is empty. A name that
    is not a plausible field name is the client's text and is written as ``?``."""
    path = ""
    for part in parts:
        if isinstance(part, int):
            path += f"[{part}]"
        elif FIELD_NAME.fullmatch(part):
            path += f".{part}" if path else part
        else:
            path += ".?" if path else "?"
    return path or None


def _routing_error(error: HTTPException, request: Request) -> RequestError:
    """Makes the error for a request whose path (404) or method (405) has no route, or that could
    not be read."""
    if error.status_code == 404:
        meant = _intended_address(request)
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


def _intended_address(request: Request) -> str | None:
    """The path that a client may have meant; None if there is no likely one. Clients put an ending
    of their own behind a base URL, which people give with ``/v1`` and without, with a slash at its
    end, as the whole address, or as that of another server's API."""
    parts = [part for part in request.scope["path"].lower().split("/") if part]
    for address in UNDER_V1:
        _, _, *ending = address.split("/")
        if parts[-len(ending) :] == ending:
            return address
    return _OLLAMA_PATHS.get("/".join(parts))
