"""Makes the prompt of a ``/v1/responses`` request: turns its items into messages for a model's chat
template.

An answer of the model consists of several items: reasoning, a message and function calls, in this
order. Successive items that fit this order become one assistant message; an item that breaks the
order begins another assistant message.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import date
from typing import Any

from mayfly_protocol.requests import ChatPrompt
from mayfly_protocol.requests import ToolChoice as Mode
from mayfly_server.api.responses.responses_request import (
    FunctionCallItem,
    FunctionCallOutputItem,
    FunctionTool,
    MessageItem,
    NamedFunction,
    Part,
    ReasoningItem,
    Refusal,
    ResponsesRequest,
)
from mayfly_server.errors import InvalidRequest
from mayfly_server.http.body import parse_json

_THOUGHT, _TEXT, _CALL = range(3)


def chat_prompt(request: ResponsesRequest) -> ChatPrompt:
    """The prompt of a ``/v1/responses`` request, in the form that a worker gets. Raises
    InvalidRequest for an empty input, arguments of a call that are no JSON object, and tools and a
    tool choice that contradict each other."""
    mode, forced = _tool_choice(request)
    return ChatPrompt(
        messages=tuple(_messages(request)),
        tools=tuple(_tool(tool) for tool in request.tools or ()),
        tool_choice=mode,
        forced_tool=forced,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        template_kwargs=_template_kwargs(request),
        date=date.today().isoformat(),
    )


def _messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    assistant = _AssistantMessages(messages)
    for number, item in enumerate(request.input):
        match item:
            case MessageItem(role="assistant"):
                assistant.message_for(_TEXT)["content"] += _text(item.content)
            case MessageItem():
                role = "system" if item.role == "developer" else item.role
                assistant.append_other({"role": role, "content": _text(item.content)})
            case ReasoningItem():
                thought = "".join(part.text for part in item.content or ())
                if thought:
                    message = assistant.message_for(_THOUGHT)
                    message["reasoning_content"] = message.get("reasoning_content", "") + thought
            case FunctionCallItem():
                assistant.message_for(_CALL).setdefault("tool_calls", []).append(
                    _call(item, number)
                )
            case FunctionCallOutputItem():
                assistant.append_other(
                    {
                        "role": "tool",
                        "tool_call_id": item.call_id,
                        "content": _text(item.output),
                    }
                )
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

    def append_other(self, message: dict[str, Any]) -> None:
        """Appends a user's, system's or tool's message; a later assistant item begins a new
        message."""
        self._last_kind = -1
        self._messages.append(message)


def _text(parts: Iterable[Part]) -> str:
    return "".join(part.refusal if isinstance(part, Refusal) else part.text for part in parts)


def _call(item: FunctionCallItem, number: int) -> dict[str, Any]:
    param = f"input[{number}].arguments"
    try:
        arguments = parse_json(item.arguments) if item.arguments.strip() else {}
    except ValueError as error:
        raise InvalidRequest(f"{param}: Not valid JSON: {error}.", param=param) from error
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{param}: Input should be a JSON object, as text.", param=param)
    function = {"name": item.name, "arguments": arguments}
    return {"id": item.call_id, "type": "function", "function": function}


def _tool(tool: FunctionTool) -> dict[str, Any]:
    return {"type": "function", "function": tool.model_dump(exclude_none=True, exclude={"type"})}


def _tool_choice(request: ResponsesRequest) -> tuple[Mode, str | None]:
    choice = request.tool_choice
    names = [tool.name for tool in request.tools or ()]
    if len(set(names)) < len(names):
        raise InvalidRequest("tools: two tools have the same name.", param="tools")
    if isinstance(choice, NamedFunction):
        if choice.name not in names:
            raise InvalidRequest("tool_choice: no tool has this name.", param="tool_choice")
        return "required", choice.name
    if choice == "required" and not names:
        raise InvalidRequest("tool_choice: the request has no tools to call.", param="tool_choice")
    return choice or "auto", None


def _template_kwargs(request: ResponsesRequest) -> dict[str, Any]:
    effort = request.reasoning.effort if request.reasoning else None
    if effort is None:
        return {}
    off = {"enable_thinking": False} if effort == "none" else {}
    return {"reasoning_effort": effort, **off}
