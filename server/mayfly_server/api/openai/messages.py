"""OpenAI's messages as a model's chat template wants them.

Content parts are joined in order with nothing in between, and missing content is empty text (a
template would print "None"); ``developer`` is called ``system``; the arguments of earlier tool
calls become objects, for templates iterate them, and an empty text is an empty object. What a text
model cannot look at, and what is no message at all, is refused by its place:
``messages[2].content[0].type``.
"""

from __future__ import annotations

from typing import Any

from mayfly_server.errors import InvalidRequest
from mayfly_server.http.body import parse_json
from mayfly_server.http.errors import FIELD_NAME, field_path

_EVERY = {"role", "content", "name"}
_FIELDS = {
    "system": _EVERY,
    "developer": _EVERY,
    "user": _EVERY,
    "tool": _EVERY | {"tool_call_id"},
    "assistant": _EVERY | {"tool_calls", "reasoning_content", "reasoning", "refusal"},
}
# Parts of an answer that clients send back as they got them; null or empty they mean nothing.
_ANSWER = {"annotations", "audio", "function_call", "refusal", "tool_calls", "reasoning_content"}
_PART_FIELDS = {"type", "text", "refusal", "cache_control"}

Place = tuple[str | int, ...]


def conversation(messages: list[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """The messages for :class:`mayfly_protocol.requests.ChatPrompt`.

    Raises:
        InvalidRequest: naming the place in the request.
    """
    return tuple(_message(message, ("messages", i)) for i, message in enumerate(messages))


def _message(message: dict[str, Any], at: Place) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or role not in _FIELDS:
        raise _invalid((*at, "role"), f"Input should be one of {', '.join(_FIELDS)}")
    for name, value in message.items():
        meaningless = name in _ANSWER and value in (None, [])
        if name not in _FIELDS[role] and not meaningless:
            raise _invalid((*at, name), f"A message of this role ({role}) has no such field")
    made: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": _content(message, at),
    }
    for name in ("name", "tool_call_id"):
        if message.get(name) is not None:
            made[name] = _string(message[name], (*at, name))
    for name in ("reasoning_content", "reasoning"):
        if message.get(name):
            made["reasoning_content"] = _string(message[name], (*at, name))
    if message.get("tool_calls"):
        made["tool_calls"] = _tool_calls(message["tool_calls"], (*at, "tool_calls"))
    return made


def _content(message: dict[str, Any], at: Place) -> str:
    match message.get("content"):
        case str(text):
            return text
        case list(parts):
            return "".join(_part(part, (*at, "content", i)) for i, part in enumerate(parts))
        case None if message["role"] == "assistant":
            return _string(message.get("refusal") or "", (*at, "refusal"))
    raise _invalid((*at, "content"), "Input should be a string or a list of content parts")


def _part(part: Any, at: Place) -> str:
    if not isinstance(part, dict):
        raise _invalid(at, "A content part should be an object")
    kind = part.get("type")
    if kind not in ("text", "refusal"):
        named = kind if isinstance(kind, str) and FIELD_NAME.fullmatch(kind) else "unknown"
        raise _invalid((*at, "type"), f"Only text can be read here, no part of type {named}")
    for name in part:
        if name not in _PART_FIELDS:
            raise _invalid((*at, name), "A content part has no such field")
    return _string(part.get(kind), (*at, kind))


def _tool_calls(calls: Any, at: Place) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise _invalid(at, "Input should be a list")
    return [_tool_call(call, (*at, i)) for i, call in enumerate(calls)]


def _tool_call(call: Any, at: Place) -> dict[str, Any]:
    if not isinstance(call, dict) or call.get("type", "function") != "function":
        raise _invalid(at, "A tool call should be an object of type function")
    function = call.get("function")
    if not isinstance(function, dict):
        raise _invalid((*at, "function"), "Input should be an object")
    made: dict[str, Any] = {
        "type": "function",
        "function": {
            "name": _string(function.get("name"), (*at, "function", "name")),
            "arguments": _arguments(function.get("arguments"), (*at, "function", "arguments")),
        },
    }
    if call.get("id") is not None:
        made["id"] = _string(call["id"], (*at, "id"))
    return made


def _arguments(value: Any, at: Place) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = parse_json(value) if value.strip() else {}
        except ValueError as error:
            raise _invalid(at, f"Not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise _invalid(at, "Input should be a JSON object, as text")
    return value


def _string(value: Any, at: Place) -> str:
    if not isinstance(value, str):
        raise _invalid(at, "Input should be a string")
    return value


def _invalid(at: Place, problem: str) -> InvalidRequest:
    param = field_path(at)
    return InvalidRequest(f"{param}: {problem}.", param=param)
