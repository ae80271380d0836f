"""Tool calls out of the text that a model wrote."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Call:
    """``arguments`` is a JSON object as text."""

    name: str
    arguments: str


class Tools:
    """The tools of one request, and the parser of the model that is to call them.

    ``parser`` is one of mlx-lm's ``parse_tool_call(text, tools)``, or None where calls come as
    the JSON of :func:`read_json`.
    """

    def __init__(self, tools: Collection[dict[str, Any]], parser: Any | None) -> None:
        self._tools = list(tools)
        self._names = frozenset(tool["function"]["name"] for tool in tools)
        self._parser = parser or read_json

    def read(self, text: str) -> list[Call]:
        """The calls in a text, or none if anything about it is not as it has to be: every call
        has the name of one of the tools and an object as its arguments."""
        try:
            parsed = self._parser(text, self._tools)
        except Exception:
            # Parsers meet whatever a model can write, and raise whatever that makes them raise:
            # ValueError, AttributeError, TypeError, RecursionError, MemoryError from ast. All of
            # it means that the text is not a call.
            return []
        calls = [self._call(one) for one in (parsed if isinstance(parsed, list) else [parsed])]
        return [] if None in calls else [call for call in calls if call is not None]

    def _call(self, parsed: Any) -> Call | None:
        if not isinstance(parsed, dict):
            return None
        name, arguments = parsed.get("name"), parsed.get("arguments")
        if not isinstance(name, str) or name not in self._names or not isinstance(arguments, dict):
            return None
        text = _json(arguments)
        return None if text is None else Call(name, text)


def read_json(text: str, tools: Any = None) -> Any:
    """Reads ``[{"name": …, "arguments": {…}}, …]``, the form that forced calls are made to take."""
    return json.loads(text)


def _json(arguments: dict[str, Any]) -> str | None:
    """JSON text, or None for what has no place in JSON: parsers make sets, bytes and NaN, too."""
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return None
    # Half a surrogate pair is fine as an escape, and nowhere else.
    return text if _is_unicode(text) else json.dumps(arguments, allow_nan=False)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def call_id(rid: str, choice: int, index: int) -> str:
    """A call's id: the same whichever worker, and whichever attempt, writes the call."""
    digest = hashlib.sha256(f"{rid}/{choice}/{index}".encode()).hexdigest()
    return f"call_{digest[:24]}"
