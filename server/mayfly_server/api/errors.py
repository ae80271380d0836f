"""Errors as HTTP: one envelope for whatever refuses a request, FastAPI and Starlette included."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Scope

from mayfly_server.api.anthropic.errors import anthropic_answer, speaks_anthropic
from mayfly_server.api.request_id import stamp
from mayfly_server.errors import InvalidRequest, RequestError

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
