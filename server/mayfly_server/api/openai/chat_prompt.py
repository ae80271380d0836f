"""Makes the prompt of an OpenAI chat request: checks its messages and tools, and brings them into
the form that a model's chat template takes.

The content parts of a message are joined in order with nothing in between. Missing content becomes
empty text, because a template would print "None". The role ``developer`` becomes ``system``. The
arguments of earlier tool calls become objects, because templates iterate over arguments; arguments
that are an empty text become an empty object.

Images and other parts that a text model cannot read become a note where they stand in a tool's
result or an earlier answer, since a client sends these again with every request. A user's own are
refused, as malformed messages are, with an error that names the place in the request, such as
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
    ChatTextPart,
    ChatToolChoice,
    RefusalPart,
    SystemMessage,
    ToolMessage,
    UserMessage,
)
from mayfly_server.api.request_fields import call_arguments, left_out, without_idle_fields
from mayfly_server.errors import InvalidRequest
from mayfly_server.http.errors import FIELD_NAME, field_path
from mayfly_server.http.ignored_fields import asks_nothing

_MODELS: dict[str, type[BaseModel]] = {
    "system": SystemMessage,
    "developer": SystemMessage,
    "user": UserMessage,
    "tool": ToolMessage,
    "assistant": AssistantMessage,
}
_FIELDS = {role: model.model_fields.keys() for role, model in _MODELS.items()}
_PART_FIELDS = ChatTextPart.model_fields.keys() | RefusalPart.model_fields.keys()
_CLIENT_FIELDS = {"created_at", "id", "metadata", "timestamp"}
"""Fields of a client's own in a message of any role; ignored."""
_ANSWER_FIELDS = {
    "annotations",
    "images",
    "parsed",
    "reasoning_details",
    "reasoning_items",
    "reasoning_opaque",
    "thinking_blocks",
}
"""Fields of an earlier answer, by this server or another, that clients and gateways send back
unchanged. They repeat its text or thoughts, or only the server that sent them understands them."""
_REASONING_FIELDS = ("reasoning_content", "reasoning", "reasoning_text", "thinking")
_TAKEN = {role: fields | _CLIENT_FIELDS for role, fields in _FIELDS.items()}
_TAKEN["assistant"] |= _ANSWER_FIELDS.union(_REASONING_FIELDS)
_REASONING_PARTS = ("thinking", "redacted_thinking", "reasoning")
_MEDIA = {
    "audio": "audio",
    "audio_url": "audio",
    "document": "file",
    "file": "file",
    "image": "image",
    "image_file": "image",
    "image_url": "image",
    "input_audio": "audio",
    "input_file": "file",
    "input_image": "image",
    "video": "video",
    "video_url": "video",
}
"""Types of content parts that hold no text, as OpenAI and others call them."""
_REMEDIES = {
    "audio": "an earlier answer's sound cannot be read; send its words as content",
    "function_call": "use tool_calls instead",
    "prefix": "use the request's continue_final_message instead",
}

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
    """The template's variables that a request sets; what it says in them goes before the same in
    other fields."""
    kwargs = dict(request.chat_template_kwargs or {})
    thinking, reasoning = request.thinking, request.reasoning
    effort = request.reasoning_effort or (reasoning.effort if reasoning else None)
    asked: list[tuple[str, Any]] = [
        ("enable_thinking", request.enable_thinking),
        ("reasoning_effort", effort),
        ("enable_thinking", False if effort == "none" else None),
    ]
    if reasoning is not None:
        asked += [("enable_thinking", reasoning.enabled), ("thinking_budget", reasoning.max_tokens)]
    if thinking is not None:
        wanted = {"enabled": True, "disabled": False}.get(thinking.type)
        asked += [
            ("enable_thinking", wanted),
            ("thinking_budget", thinking.budget_tokens),
            ("clear_thinking", thinking.clear_thinking),
        ]
    for name, value in asked:
        if value is not None:
            kwargs.setdefault(name, value)
    return kwargs


def read_messages(messages: list[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Checks a request's messages and returns them as chat templates take them: text content, no
    ``developer`` role, arguments of tool calls as objects. Raises InvalidRequest, which names the
    faulty field."""
    made = []
    after_tool = False
    for i, message in enumerate(messages):
        made.append(_message(message, ("messages", i), after_tool))
        after_tool = message["role"] == "tool"
    return tuple(made)


def _message(message: dict[str, Any], at: Place, after_tool: bool) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or role not in _FIELDS:
        raise _invalid((*at, "role"), f"Input should be one of {', '.join(_FIELDS)}")
    for name in without_idle_fields(message, _TAKEN[role]).keys() - _TAKEN[role]:
        remedy = f"; {_REMEDIES[name]}" if name in _REMEDIES else ""
        raise _invalid((*at, name), f"A message of this role ({role}) has no such field{remedy}")
    made: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        # OpenAI's API takes images from users alone, so gateways and agents move those of a tool's
        # result to a user's message behind it.
        "content": _content(message, at, noted=role in ("assistant", "tool") or after_tool),
    }
    for name in ("name", "tool_call_id"):
        if not asks_nothing(message.get(name)):
            made[name] = _string(message[name], (*at, name))
    if role == "assistant":
        made["content"] += left_out("image") * len(_objects(message.get("images")))
        if reasoning := _reasoning(message, at):
            made["reasoning_content"] = reasoning
    if message.get("tool_calls"):
        made["tool_calls"] = _tool_calls(message["tool_calls"], (*at, "tool_calls"))
    return made


def _content(message: dict[str, Any], at: Place, *, noted: bool) -> str:
    """The text of a message. ``noted`` says that a note stands in for images and the like, which
    are refused otherwise."""
    match message.get("content"):
        case str(text):
            return text
        case list(parts):
            thoughts = _REASONING_PARTS if message["role"] == "assistant" else ()
            return "".join(
                _part(part, (*at, "content", i), noted=noted)
                for i, part in enumerate(parts)
                if not (isinstance(part, dict) and part.get("type") in thoughts)
            )
        case None if message["role"] == "assistant":
            return _string(message.get("refusal") or "", (*at, "refusal"))
        case None if message["role"] == "tool":
            return ""
    raise _invalid((*at, "content"), "Input should be a string or a list of content parts")


def _part(part: Any, at: Place, *, noted: bool) -> str:
    if not isinstance(part, dict):
        raise _invalid(at, "A content part should be an object")
    kind = part.get("type")
    if kind not in ("text", "refusal"):
        known = kind if isinstance(kind, str) and FIELD_NAME.fullmatch(kind) else "unknown"
        if noted and known in _MEDIA:
            return left_out(_MEDIA[known])
        raise _invalid((*at, "type"), f"This model reads text only, and no part of type {known}")
    for name in without_idle_fields(part, _PART_FIELDS).keys() - _PART_FIELDS:
        raise _invalid((*at, name), "A content part has no such field")
    text = part.get(kind, 0)
    return "" if text is None else _string(text, (*at, kind))


def _reasoning(message: dict[str, Any], at: Place) -> str:
    """The thoughts of an earlier answer, from the first field that holds any."""
    for name in _REASONING_FIELDS:
        if message.get(name):
            return _string(message[name], (*at, name))
    content = _objects(message.get("content"))
    parts = [part for part in content if part.get("type") in _REASONING_PARTS]
    for blocks in (message.get("reasoning_details"), message.get("thinking_blocks"), parts):
        texts = [block.get("thinking") or block.get("text") for block in _objects(blocks)]
        if text := "".join(text for text in texts if isinstance(text, str)):
            return text
    return ""


def _objects(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _tool_calls(calls: Any, at: Place) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise _invalid(at, "Input should be a list")
    return [_tool_call(call, (*at, i)) for i, call in enumerate(calls)]


def _tool_call(call: Any, at: Place) -> dict[str, Any]:
    if not isinstance(call, dict) or (call.get("type") or "function") != "function":
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
        return call_arguments(value)
    if value is None:
        return {}
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
