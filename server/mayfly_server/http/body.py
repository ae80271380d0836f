"""Strict parsing of a request's JSON body.

A body has to be UTF-8 with one JSON value, without NaN or Infinity, numbers that JSON parsers read
differently, or unpaired surrogates, and nested at most 200 levels deep (the parser's own limit,
which costs no stack). Every POST route reads its body this way before the body is validated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json

from mayfly_server.errors import BodyTooLarge, InvalidRequest, UnsupportedMediaType
from mayfly_server.http.ignored_fields import field_names, take_unknown

MAX_VALUES = 1_000_000
"""Largest number of JSON values in one body. A parsed value takes far more memory than its bytes,
so that a limit on the bytes is not enough."""

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_MAYBE_TOO_BIG = re.compile(rb"\d{19}|\d[eE]\+?\d{3}")


def parse_json(raw: bytes | str) -> Any:
    """Parses a JSON text strictly. Raises ValueError, which names the problem and, except for
    numbers that are too large, its place in the text."""
    # By default the parser would keep short strings, which are a client's text, in memory.
    value = from_json(raw, allow_inf_nan=False, cache_strings="keys")
    data = raw.encode() if isinstance(raw, str) else raw
    if _MAYBE_TOO_BIG.search(data):
        _check_numbers(value)
    return value


def _check_numbers(value: Any) -> None:
    """Raises ValueError if a JSON value holds an integer of more than 64 bits or a float that is
    not finite: JSON parsers read such numbers differently."""
    pending = [value]
    while pending:
        match pending.pop():
            case dict() as members:
                pending.extend(members.values())
            case list() as items:
                pending.extend(items)
            case int() as number if not -(2**63) <= number < 2**64:
                raise ValueError("an integer does not fit in 64 bits")
            case float() as number if not math.isfinite(number):
                raise ValueError("a number is too large")


def parse_object(raw: bytes) -> dict[str, Any]:
    """Parses a request's body strictly as a JSON object.

    Raises:
        InvalidRequest: the body is no JSON object.
        BodyTooLarge: the body holds too many values.
    """
    if _too_many_values(raw):
        raise BodyTooLarge(f"The body holds more than {MAX_VALUES} values.")
    try:
        body = parse_json(raw)
    except ValueError as error:
        raise InvalidRequest(
            f"The body is not valid JSON: {error}.", code="invalid_json"
        ) from error
    if not isinstance(body, dict):
        raise InvalidRequest("The body has to be a JSON object.", code="invalid_json")
    return body


def _too_many_values(raw: bytes) -> bool:
    """True if a JSON text holds more than :data:`MAX_VALUES` values. It counts the commas and
    opening brackets, which is fast; strings, which may contain these characters, are removed only
    if the count with them is above the limit."""
    if raw.count(b'"') > 2 * MAX_VALUES:
        return True
    return _separators(raw) > MAX_VALUES and _separators(_STRING.sub(b"", raw)) > MAX_VALUES


def _separators(raw: bytes) -> int:
    return raw.count(b",") + raw.count(b"[") + raw.count(b"{")


class _Parsed(Request):
    """A request whose body was parsed already. FastAPI calls :meth:`body`, whose content it does
    not use (an empty JSON object stands for it), and then :meth:`json`, which returns the parsed
    body."""

    def __init__(self, request: Request, parsed: dict[str, Any]) -> None:
        super().__init__(request.scope, request.receive)
        self._parsed = parsed

    async def body(self) -> bytes:
        return b"{}"

    async def json(self) -> Any:
        return self._parsed


class StrictRoute(APIRoute):
    """A FastAPI route whose body is parsed strictly, by :func:`parse_object`, and has to have a
    JSON Content-Type. Unknown fields of the body are removed, or refused if ``strict_fields`` is
    set."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        model: Any = self.body_field.field_info.annotation
        known = field_names(model)

        async def handle_strictly(request: Request) -> Response:
            content_type = request.headers.get("content-type", "application/json")
            essence = content_type.partition(";")[0].strip().lower()
            if essence != "application/json" and not essence.endswith("+json"):
                raise UnsupportedMediaType(
                    "The body has to be application/json, and the header Content-Type to say so."
                )
            if request.headers.get("content-encoding", "identity").lower() != "identity":
                raise UnsupportedMediaType("The body must not be compressed.")
            body = parse_object(await request.body())
            front = request.app.state.front
            if not front.settings.strict_fields:
                take_unknown(body, known, request.scope, front.ignored_fields)
            return await handle(_Parsed(request, body))

        return handle_strictly
