"""Makes the prompt of an Anthropic request: brings its messages and tools into OpenAI's form, which
models' chat templates take.

::

    user       text, tool_result          -> tool messages, then a user message
    assistant  thinking, text, tool_use   -> one assistant message
    system (of the request, or a message) -> a system message

The texts of one message are joined with nothing in between. The result of a tool that failed is
given the prefix "Error: ", because templates have no field for a failure. If the last message is
the assistant's, the model continues that message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import date
from typing import Any

from mayfly_protocol.requests import ChatPrompt
from mayfly_protocol.requests import ToolChoice as Mode
from mayfly_server.api.anthropic.messages_request import (
    AnthropicTool,
    Message,
    PromptFields,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from mayfly_server.errors import InvalidRequest

_MODES: dict[str, Mode] = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}


def chat_prompt(request: PromptFields) -> ChatPrompt:
    """The prompt of an Anthropic request, in the form that a worker gets. Raises InvalidRequest for
    misplaced content blocks, and for tools and a tool choice that contradict each other."""
    messages = list(_messages(request))
    mode, forced = _tool_choice(request)
    prefilled = request.messages[-1].role == "assistant"
    if prefilled and messages[-1].get("tool_calls"):
        raise InvalidRequest(
            "messages: a tool_use has to be followed by its tool_result.", param="messages"
        )
    choice = request.tool_choice
    return ChatPrompt(
        messages=tuple(messages),
        tools=tuple(_tool(tool) for tool in request.tools or ()),
        tool_choice=mode,
        forced_tool=forced,
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        template_kwargs=_template_kwargs(request),
        add_generation_prompt=not prefilled,
        continue_final_message=prefilled,
        date=date.today().isoformat(),
    )


def _messages(request: PromptFields) -> Iterator[dict[str, Any]]:
    if request.system:
        yield {"role": "system", "content": _text(request.system)}
    for number, message in enumerate(request.messages):
        match message.role:
            case "assistant":
                yield _assistant(message, number)
            case "system":
                yield {"role": "system", "content": _only_text(message, number)}
            case "user":
                yield from _user(message, number)


def _assistant(message: Message, number: int) -> dict[str, Any]:
    made: dict[str, Any] = {"role": "assistant", "content": ""}
    thoughts = []
    calls: list[dict[str, Any]] = []
    for place, block in enumerate(message.content):
        match block:
            case TextBlock():
                made["content"] += block.text
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case RedactedThinkingBlock():
                pass
            case ToolUseBlock():
                function = {"name": block.name, "arguments": block.input}
                calls.append({"id": block.id, "type": "function", "function": function})
            case ToolResultBlock():
                raise _misplaced(block, "user", number, place)
    if any(thoughts):
        made["reasoning_content"] = "".join(thoughts)
    if calls:
        made["tool_calls"] = calls
    return made


def _user(message: Message, number: int) -> Iterator[dict[str, Any]]:
    texts = []
    results = 0
    for place, block in enumerate(message.content):
        match block:
            case TextBlock():
                texts.append(block)
            case ToolResultBlock():
                results += 1
                content = _text(block.content or ())
                yield {
                    "role": "tool",
                    "tool_call_id": block.tool_use_id,
                    "content": f"Error: {content}" if block.is_error else content,
                }
            case _:
                raise _misplaced(block, "assistant", number, place)
    if texts or not results:
        yield {"role": "user", "content": _text(texts)}


def _only_text(message: Message, number: int) -> str:
    for place, block in enumerate(message.content):
        if not isinstance(block, TextBlock):
            raise _misplaced(block, "user or assistant", number, place)
    return "".join(block.text for block in message.content if isinstance(block, TextBlock))


def _misplaced(block: Any, role: str, number: int, place: int) -> InvalidRequest:
    param = f"messages[{number}].content[{place}]"
    return InvalidRequest(
        f"{param}: A {block.type} block belongs in a message of role {role}.", param=param
    )


def _text(blocks: Iterable[TextBlock]) -> str:
    return "".join(block.text for block in blocks)


def _tool(tool: AnthropicTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _tool_choice(request: PromptFields) -> tuple[Mode, str | None]:
    choice = request.tool_choice
    names = [tool.name for tool in request.tools or ()]
    if len(set(names)) < len(names):
        raise InvalidRequest("tools: two tools have the same name.", param="tools")
    if choice is None:
        return "auto", None
    if choice.type == "tool" and choice.name not in names:
        raise InvalidRequest("tool_choice.name: no tool has this name.", param="tool_choice.name")
    if choice.type == "any" and not names:
        raise InvalidRequest("tool_choice: the request has no tools to call.", param="tool_choice")
    if choice.type != "tool" and choice.name is not None:
        raise InvalidRequest(
            "tool_choice.name: only a choice of type tool names one.", param="tool_choice.name"
        )
    return _MODES[choice.type], choice.name


def _template_kwargs(request: PromptFields) -> dict[str, Any]:
    """The options for the model's chat template that the request's ``thinking`` and ``effort`` ask
    for. Empty if the request has neither; the template's defaults then decide whether the model
    thinks."""
    kwargs: dict[str, Any] = {}
    thinking = request.thinking
    if thinking is not None:
        if (thinking.type == "enabled") != (thinking.budget_tokens is not None):
            raise InvalidRequest(
                "thinking.budget_tokens goes with type enabled, and with it alone.",
                param="thinking.budget_tokens",
            )
        kwargs["enable_thinking"] = thinking.type != "disabled"
        if thinking.budget_tokens is not None:
            kwargs["thinking_budget"] = thinking.budget_tokens
    if request.output_config is not None and request.output_config.effort is not None:
        kwargs["reasoning_effort"] = request.output_config.effort
    return kwargs
