"""Makes the prompt of an OpenAI chat request: checks its messages and tools, and brings them into
the form that a model's chat template takes.

The content parts of a message are joined in order with nothing in between. Missing content becomes
empty text, because a template would print "None". The role ``developer`` becomes ``system``. The
arguments of earlier tool calls become objects, because templates iterate over arguments; arguments
that are an empty text become an empty object. Images and other parts that a text model cannot read,
and malformed messages, are refused with an error that names the place in the request, such as
``messages[2].content[0].type``.
"""

from __future__ import annotations

from datetime import date
from typing import Any

from pydantic import BaseModel

from mayfly_protocol.requests import ChatPrompt
from mayfly_server.api.openai.chat_request import (
    AssistantMessage,
    ChatRequest,
    ChatToolChoice,
    RefusalPart,
    SystemMessage,
    TextPart,
    ToolMessage,
    UserMessage,
)
from mayfly_server.errors import InvalidRequest
from mayfly_server.http.body import parse_json
from mayfly_server.http.errors import FIELD_NAME, field_path

_MODELS: dict[str, type[BaseModel]] = {
    "system": SystemMessage,
    "developer": SystemMessage,
    "user": UserMessage,
    "tool": ToolMessage,
    "assistant": AssistantMessage,
}
_FIELDS = {role: model.model_fields.keys() for role, model in _MODELS.items()}
_PART_FIELDS = TextPart.model_fields.keys() | RefusalPart.model_fields.keys()
_ANSWER_FIELDS = {
    "annotations",
    "audio",
    "function_call",
    "refusal",
    "tool_calls",
    "reasoning_content",
}
"""Fields of an earlier answer's message that clients send back unchanged; ignored if null or
empty."""

Place = tuple[str | int, ...]


def chat_prompt(request: ChatRequest) -> ChatPrompt:
    """The prompt of an OpenAI chat request, in the form that a worker gets. Raises InvalidRequest
    for malformed messages, and for tools and a tool choice that contradict each other."""
    choice = _tool_choice(request)
    continue_final = bool(request.continue_final_message)
    add_prompt = request.add_generation_prompt
    if continue_final and add_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other.",
            param="continue_final_message",
        )
    return ChatPrompt(
        messages=read_messages(request.messages),
        tools=tuple(tool.model_dump(exclude_none=True) for tool in request.tools or ()),
        tool_choice=choice.mode,
        forced_tool=choice.name,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        template_kwargs=_template_kwargs(request),
        add_generation_prompt=not continue_final if add_prompt is None else add_prompt,
        continue_final_message=continue_final,
        date=date.today().isoformat(),
    )


def _tool_choice(request: ChatRequest) -> ChatToolChoice:
    choice: ChatToolChoice = request.tool_choice or ChatToolChoice("auto")
    names = [tool.function.name for tool in request.tools or ()]
    if len(set(names)) < len(names):
        raise InvalidRequest("tools: two tools have the same name.", param="tools")
    if choice.mode == "required" and not names:
        raise InvalidRequest("tool_choice: the request has no tools to call.", param="tool_choice")
    if choice.name is not None and choice.name not in names:
        raise InvalidRequest("tool_choice: no tool has this name.", param="tool_choice")
    return choice


def _template_kwargs(request: ChatRequest) -> dict[str, Any]:
    kwargs = dict(request.chat_template_kwargs or {})
    effort = request.reasoning_effort
    if effort is not None:
        kwargs.setdefault("reasoning_effort", effort)
        if effort == "none":
            kwargs.setdefault("enable_thinking", False)
    return kwargs


def read_messages(messages: list[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Checks a request's messages and returns them as chat templates take them: text content, no
    ``developer`` role, arguments of tool calls as objects. Raises InvalidRequest, which names the
    faulty field."""
    return tuple(_message(message, ("messages", i)) for i, message in enumerate(messages))


def _message(message: dict[str, Any], at: Place) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or role not in _FIELDS:
        raise _invalid((*at, "role"), f"Input should be one of {', '.join(_FIELDS)}")
    for name, value in message.items():
        meaningless = name in _ANSWER_FIELDS and value in (None, [])
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
