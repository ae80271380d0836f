"""Makes the prompt of a ``/v1/responses`` request: turns its items into messages for a model's chat
template.

An answer of the model consists of several items: reasoning, a message and calls, in this order.
Successive items that fit this order become one assistant message; an item that breaks the order
begins another assistant message.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from itertools import pairwise
from typing import Any

from mayfly_protocol.requests import ChatPrompt
from mayfly_protocol.requests import ToolChoice as Mode
from mayfly_server.api.request_fields import call_arguments, left_out
from mayfly_server.api.responses.responses_items import (
    AdditionalToolsItem,
    CustomToolCallItem,
    FunctionCallItem,
    HostedItem,
    MediaPart,
    MessageItem,
    Part,
    ReasoningItem,
    Refusal,
    ToolOutputItem,
    ToolSearchCallItem,
    ToolSearchOutputItem,
)
from mayfly_server.api.responses.responses_request import PromptFields
from mayfly_server.api.responses.responses_tools import (
    INPUT,
    OWN,
    AllowedTools,
    NamedTool,
    OfferedTool,
    ToolNames,
    cannot_run,
)
from mayfly_server.errors import InvalidRequest
from mayfly_server.http.ignored_fields import asks_nothing

_THOUGHT, _TEXT, _CALL = range(3)
_RESULTS = ("output", "outputs", "result", "results", "error")
"""Fields of a hosted tool's call, or of the item after it, that hold what the tool returned."""
_CLIENT_CALLS = {
    "apply_patch_call",
    "computer_call",
    "local_shell_call",
    "program",
    "shell_call",
}
"""Calls whose results are items of their own."""
_NAMING = ("type", "name", "namespace")
_BOOKKEEPING = {"type", "id", "call_id", "status", "caller", "created_by", "execution"}

ANSWER_SHARE = 8
"""The part of a context, one in so many, that is kept free for the answer if the request does not
say how long it may be."""


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """The prompt of a request, in the form that a worker gets, and the names of its tools."""

    prompt: ChatPrompt
    tools: ToolNames


def read_prompt(request: PromptFields) -> ReadPrompt:
    """Makes the prompt of a ``/v1/responses`` request. Raises InvalidRequest for an empty input,
    for parts that cannot be read, and for tools and a tool choice that contradict each other."""
    found = [
        tool
        for item in request.input
        if isinstance(item, AdditionalToolsItem | ToolSearchOutputItem)
        for tool in item.tools
    ]
    tools = ToolNames(request.tools or (), found)
    mode, offered = _tool_choice(request, tools)
    forced = offered[0].known_as if isinstance(request.tool_choice, NamedTool) else None
    prompt = ChatPrompt(
        messages=tuple(_messages(request, tools)),
        tools=tuple(tool.function() for tool in (tools.offered if forced else offered)),
        tool_choice=mode,
        forced_tool=forced,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        template_kwargs=_template_kwargs(request),
        date=date.today().isoformat(),
    )
    return ReadPrompt(prompt, tools)


def _messages(request: PromptFields, tools: ToolNames) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    assistant = _AssistantMessages(messages)
    for number, item in enumerate(request.input):
        at = f"input[{number}]"
        match item:
            case MessageItem(role="assistant"):
                assistant.message_for(_TEXT)["content"] += _text(item.content)
            case MessageItem():
                _check_readable(item.content, f"{at}.content")
                role = "system" if item.role == "developer" else item.role
                assistant.append_other({"role": role, "content": _text(item.content)})
            case ReasoningItem():
                if thought := item.thought:
                    message = assistant.message_for(_THOUGHT)
                    message["reasoning_content"] = message.get("reasoning_content", "") + thought
            case FunctionCallItem():
                name = tools.known_as(item.namespace, item.name)
                assistant.call(item.call_id, name, call_arguments(item.arguments))
            case CustomToolCallItem():
                name = tools.known_as(item.namespace, item.name)
                assistant.call(item.call_id, name, {INPUT: item.input})
            case ToolOutputItem():
                assistant.result(item.call_id, _text(item.output))
            case ToolSearchCallItem(call_id=str(id)):
                assistant.call(id, tools.known_as(None, "tool_search"), item.arguments)
            case ToolSearchOutputItem(call_id=str(id)):
                found = [one.known_as for one in ToolNames(item.tools, ()).offered]
                assistant.result(id, f"Tools found: {', '.join(found) or 'none'}")
            case HostedItem():
                _add_hosted(item, assistant)
    if not messages:
        raise InvalidRequest("input: There is nothing to answer.", param="input")
    return messages


class _AssistantMessages:
    """Builds a prompt's assistant messages from items (reasoning, message, function call),
    remembering the last item's kind."""

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        self._messages = messages
        self._last_kind = -1

    def message_for(self, kind: int) -> dict[str, Any]:
        """The assistant message that the next item, of the given kind, belongs to: the present one
        if the item may follow the last item (order: reasoning, text, calls; one text only), else a
        new message."""
        if self._last_kind < 0 or kind < self._last_kind or kind == self._last_kind == _TEXT:
            self._messages.append({"role": "assistant", "content": ""})
        self._last_kind = kind
        return self._messages[-1]

    def call(self, id: str, name: str, arguments: dict[str, Any]) -> None:
        function = {"name": name, "arguments": arguments}
        calls = self.message_for(_CALL).setdefault("tool_calls", [])
        calls.append({"id": id, "type": "function", "function": function})

    def result(self, id: str, text: str) -> None:
        self.append_other({"role": "tool", "tool_call_id": id, "content": text})

    def append_other(self, message: dict[str, Any]) -> None:
        """Appends a user's, system's or tool's message; a later assistant item begins a new
        message."""
        self._last_kind = -1
        self._messages.append(message)


def _text(parts: Sequence[Part]) -> str:
    texts = []
    for part in parts:
        match part:
            case Refusal():
                texts.append(part.refusal)
            case MediaPart():
                texts.append(left_out(part.type.removeprefix("input_")))
            case _:
                texts.append(part.text)
    return "".join(texts)


def _check_readable(parts: Sequence[Part], at: str) -> None:
    """Refuses images and the like in a message of the user's, which the answer would have to be
    about."""
    for number, part in enumerate(parts):
        if isinstance(part, MediaPart):
            param = f"{at}[{number}].type"
            raise InvalidRequest(
                f"{param}: This model reads text only, and no part of type {part.type}.",
                param=param,
            )


def _add_hosted(item: HostedItem, assistant: _AssistantMessages) -> None:
    """Adds a call of a tool that this server does not have, or its result. A call whose result is
    not known, as of a web search, is left out: the message after it says what was found."""
    fields: dict[str, Any] = item.model_extra or {}
    id = str(fields.get("call_id") or fields.get("id") or "")
    given = {name: value for name, value in fields.items() if not asks_nothing(value)}
    results = [_result(item.type, given[name]) for name in _RESULTS if name in given]
    if item.type.endswith("_output"):
        assistant.result(id, "\n".join(results) or str(given.get("status", "")))
    elif results or item.type in _CLIENT_CALLS:
        asked = given.keys() - _BOOKKEEPING - set(_RESULTS)
        name = item.type.removesuffix("_call")
        assistant.call(id, name, {key: given[key] for key in given if key in asked})
        if results:
            assistant.result(id, "\n".join(results))


def _result(kind: str, value: Any) -> str:
    """The text of a hosted tool's result; a note in place of an image."""
    if kind == "image_generation_call":
        return left_out("image")
    match value:
        case str():
            return value
        case list():
            return "\n".join(_result(kind, one) for one in value)
        case {"type": "image" | "computer_screenshot" | "input_image"}:
            return left_out("image")
        case {"type": "logs", "logs": str(text)} | {"text": str(text)}:
            return text
    return json.dumps(value, ensure_ascii=False)


def _tool_choice(request: PromptFields, tools: ToolNames) -> tuple[Mode, list[OfferedTool]]:
    """The mode of calling tools, and the tools that may be called. Hosted tools among others are no
    more than declared; alone, they are what the client wants."""
    choice = request.tool_choice
    offered = tools.offered
    kinds = tools.hosted
    mode: Mode = "auto"
    match choice:
        case NamedTool():
            found = tools.chosen(choice.type, choice.name, choice.namespace)
            if found is None:
                raise InvalidRequest("tool_choice: no tool has this name.", param="tool_choice")
            return "required", [found]
        case AllowedTools():
            mode = choice.mode
            offered = _allowed(choice, tools)
            kinds = [str(one.get("type")) for one in choice.tools]
        case str():
            mode = choice
    hosted = next((kind for kind in kinds if kind not in OWN), None)
    if not offered and mode != "none" and (hosted is not None or mode == "required"):
        param = "tools" if choice is None or choice == "auto" else "tool_choice"
        reason = cannot_run(hosted) if hosted else "the request has no tools to call"
        raise InvalidRequest(f"{param}: {reason}.", param=param)
    return mode, offered


def _allowed(choice: AllowedTools, tools: ToolNames) -> list[OfferedTool]:
    """The offered tools that a choice of allowed tools names, one by one or by their namespace.
    Raises InvalidRequest for a name that no tool has: the model would get fewer tools than the
    client means."""
    allowed: list[OfferedTool | None] = []
    for number, one in enumerate(choice.tools):
        kind, name, namespace = (one.get(key) for key in _NAMING)
        if kind == "namespace":
            named: list[OfferedTool | None] = [t for t in tools.offered if t.namespace == name]
        else:
            named = [tools.chosen(kind, name, namespace)]
        if not any(named) and (kind in OWN or not isinstance(kind, str)):
            problem = f"tool_choice.tools[{number}]: no tool has this name."
            raise InvalidRequest(problem, param="tool_choice")
        allowed += named
    return [tool for tool in tools.offered if any(tool is one for one in allowed)]


def _template_kwargs(request: PromptFields) -> dict[str, Any]:
    effort = request.reasoning.effort if request.reasoning else None
    asked: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if effort == "none":
        asked["enable_thinking"] = False
    return asked | (request.chat_template_kwargs or {})


# Conversations that are too long


def prompt_limit(context: int, max_tokens: int | None) -> int:
    """The most tokens that a prompt may have, so that an answer fits in the context; at least half
    of it."""
    answer = context // ANSWER_SHARE if max_tokens is None else max_tokens
    return context - min(answer, context // 2)


async def shortened(
    prompt: ChatPrompt, limit: int, count: Callable[[ChatPrompt], Awaitable[int]]
) -> ChatPrompt:
    """Drops as few of the oldest messages as bring a prompt down to ``limit`` tokens, or all that
    can be dropped; ``count`` gives the number of a prompt's tokens."""
    if await count(prompt) <= limit:
        return prompt
    groups = _droppable(prompt.messages)
    fewest, most = 1, len(groups)
    while fewest < most:
        middle = (fewest + most) // 2
        if await count(_without(prompt, groups[:middle])) <= limit:
            most = middle
        else:
            fewest = middle + 1
    return _without(prompt, groups[:most])


def _droppable(messages: Sequence[dict[str, Any]]) -> list[range]:
    """Groups of messages that can be dropped, each together, in this order."""
    begins = [
        at
        for at, message in enumerate(messages)
        if message["role"] == "user" and (at == 0 or messages[at - 1]["role"] != "user")
    ]
    first = next((at for at, message in enumerate(messages) if message["role"] != "system"), 0)
    if not begins or begins[0] != first:
        begins.insert(0, first)
    turns = [range(a, b) for a, b in pairwise(begins)]
    calls = [at for at in range(begins[-1], len(messages)) if messages[at].get("tool_calls")]
    return turns + [range(a, b) for a, b in pairwise(calls)]


def _without(prompt: ChatPrompt, groups: Sequence[range]) -> ChatPrompt:
    dropped = {at for group in groups for at in group}
    kept = tuple(
        message
        for at, message in enumerate(prompt.messages)
        if at not in dropped or message["role"] == "system"
    )
    return replace(prompt, messages=kept)
