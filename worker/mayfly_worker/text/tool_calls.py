"""Parses tool calls from the text that a model wrote."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A tool call that a model wrote. ``arguments`` is a JSON object as text."""

    name: str
    arguments: str


class ToolCallParser:
    """Parses calls of one request's tools, in the model's format.

    ``parser`` is one of mlx-lm's functions ``parse_tool_call(text, tools)``, or None if calls come
    as the JSON of :func:`parse_json_calls`.
    """

    def __init__(self, tools: Collection[dict[str, Any]], parser: Any | None) -> None:
        self._tools = list(tools)
        self._names = frozenset(tool["function"]["name"] for tool in tools)
        self._parser = parser or parse_json_calls

    def parse(self, text: str) -> list[ParsedCall]:
        """Returns the tool calls in a text; an empty list unless every call has the name of one of
        the tools and an object as its arguments."""
        try:
            parsed = self._parser(text, self._tools)
        except Exception:
            # mlx-lm's parsers raise anything on malformed text: ValueError, AttributeError,
            # TypeError, RecursionError, MemoryError from ast. All of it means: not a call.
            return []
        calls = [self._call(one) for one in (parsed if isinstance(parsed, list) else [parsed])]
        return [] if None in calls else [call for call in calls if call is not None]

    def _call(self, parsed: Any) -> ParsedCall | None:
        if not isinstance(parsed, dict):
            return None
        name, arguments = parsed.get("name"), parsed.get("arguments")
        if not isinstance(name, str) or name not in self._names or not isinstance(arguments, dict):
            return None
        text = _json(arguments)
        return None if text is None else ParsedCall(name, text)


def parse_json_calls(text: str, tools: Any = None) -> Any:
    """Parses ``[{"name": …, "arguments": {…}}, …]``, the form that the grammar prescribes if a
    request forces tool calls."""
    return json.loads(text)


def _json(arguments: dict[str, Any]) -> str | None:
    """Returns a call's arguments as JSON text; None if JSON cannot express them, such as the sets,
    bytes and NaN that some parsers make."""
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return None
    # Half a surrogate pair can be sent as an escape only.
    return text if _is_unicode(text) else json.dumps(arguments, allow_nan=False)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def call_id(rid: str, choice: int, index: int) -> str:
    """Returns the id of a tool call, which is the same on every worker that runs the request."""
    digest = hashlib.sha256(f"{rid}/{choice}/{index}".encode()).hexdigest()
    return f"call_{digest[:24]}"
