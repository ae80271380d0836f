"""A request's body: JSON, read strictly.

Strictly UTF-8, one value, no NaN or Infinity, no number that JSON's readers do not agree on, no
unpaired surrogate, nested at most 200 deep (the parser's own bound, which costs no stack). Every
POST route reads its body this way before anything looks at it.
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
"""Largest number of values in one body: a value costs more memory than its bytes."""

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_MAYBE_TOO_BIG = re.compile(rb"\d{19}|\d[eE]\+?\d{3}")


def parse_json(raw: bytes | str) -> Any:
    """Parses a JSON text. Raises ValueError with the problem and its place in the text."""
    # By default the parser would keep short strings, which are a client's text, in memory.
    value = from_json(raw, allow_inf_nan=False, cache_strings="keys")
    data = raw.encode() if isinstance(raw, str) else raw
    if _MAYBE_TOO_BIG.search(data):
        _check_numbers(value)
    return value


def _check_numbers(value: Any) -> None:
    """Raises ValueError for integers beyond 64 bits and floats that are not finite: JSON readers
    do not agree on them."""
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
    """Parses a request's body.

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
    """Counts the separators of values, which costs little. Strings, which may contain separators,
    are taken out only where that decides."""
    if raw.count(b'"') > 2 * MAX_VALUES:
        return True
    return _separators(raw) > MAX_VALUES and _separators(_STRING.sub(b"", raw)) > MAX_VALUES


def _separators(raw: bytes) -> int:
    return raw.count(b",") + raw.count(b"[") + raw.count(b"{")


class _Parsed(Request):
    """A request whose body was parsed already. FastAPI calls :meth:`body`, then :meth:`json`."""

    def __init__(self, request: Request, parsed: dict[str, Any]) -> None:
        super().__init__(request.scope, request.receive)
        self._parsed = parsed

    async def body(self) -> bytes:
        return b"{}"

    async def json(self) -> Any:
        return self._parsed


class StrictRoute(APIRoute):
    """A route whose body is read by :func:`parse_object`, without its unknown fields unless
    ``strict_fields`` is set."""

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
