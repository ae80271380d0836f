"""Makes the prompt of an Anthropic request: brings its messages and tools into OpenAI's form, which
models' chat templates take.

::

    user       text, tool_result          -> tool messages, then a user message
    assistant  thinking, text, tool_use   -> one assistant message
    system (of the request, or a message) -> a system message

The texts of one message are joined with nothing in between. The result of a tool that failed is
given the prefix "Error: ", because templates have no field for a failure. If the last message is
the assistant's, the model continues that message.

Models here read text only. A picture in the result of a tool becomes a note, since the conversation
keeps it and could never go on otherwise; a picture of the user's own is refused.

Agents put lines into the system prompt that only Anthropic's billing reads
(``x-anthropic-billing-header: ...``) and that differ in every request. They are left out of the
prompt, so that conversations with an equal system prompt share its part of the prefix cache.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from datetime import date
from typing import Any

from mayfly_protocol.requests import ChatPrompt
from mayfly_server.api.anthropic.messages_content import (
    ContentSource,
    DocumentBlock,
    FallbackBlock,
    ImageBlock,
    Message,
    PlainTextSource,
    RedactedThinkingBlock,
    ResultBlock,
    SearchResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolAdditionBlock,
    ToolDefinition,
    ToolReferenceBlock,
    ToolRemovalBlock,
    ToolResultBlock,
    ToolUseBlock,
    TypedTool,
)
from mayfly_server.api.anthropic.messages_request import NO_COMPACTION, CompactingEdit, PromptFields
from mayfly_server.api.anthropic.messages_tools import prompt_tools, tool_choice
from mayfly_server.api.request_fields import left_out
from mayfly_server.errors import InvalidRequest, ThreadUnsupported

_BILLING = re.compile(r"\A(?:x-anthropic-[a-z-]+:[^\n]*(?:\n|\Z))+")
"""Lines for Anthropic's billing, at the beginning of a text of the system prompt."""


def chat_prompt(request: PromptFields) -> ChatPrompt:
    """The prompt of an Anthropic request, in the form that a worker gets. Raises InvalidRequest for
    misplaced content blocks, and for tools and a tool choice that contradict each other."""
    _refuse_what_changes_the_conversation(request)
    messages = list(_messages(request))
    tools = prompt_tools(request)
    mode, forced = tool_choice(request, tools)
    prefilled = request.messages[-1].role == "assistant"
    if prefilled and messages[-1].get("tool_calls"):
        raise InvalidRequest(
            "messages: a tool_use has to be followed by its tool_result.", param="messages"
        )
    choice = request.tool_choice
    return ChatPrompt(
        messages=tuple(messages),
        tools=tools,
        tool_choice=mode,
        forced_tool=forced,
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        template_kwargs=_template_kwargs(request),
        add_generation_prompt=not prefilled,
        continue_final_message=prefilled,
        date=date.today().isoformat(),
    )


def _refuse_what_changes_the_conversation(request: PromptFields) -> None:
    if request.thread:
        raise ThreadUnsupported(
            "thread: This server keeps no conversations; send all messages, without thread.",
            param="thread",
        )
    edits = (request.context_management and request.context_management.edits) or ()
    for number, edit in enumerate(edits):
        if isinstance(edit, CompactingEdit):
            param = f"context_management.edits[{number}]"
            raise InvalidRequest(f"{param}: {NO_COMPACTION}.", param=param)


def _messages(request: PromptFields) -> Iterator[dict[str, Any]]:
    if system := _system_text(request.system or ()):
        yield {"role": "system", "content": system}
    users = [number for number, each in enumerate(request.messages) if each.role == "user"]
    for number, message in enumerate(request.messages):
        match message.role:
            case "assistant":
                yield _assistant(message, number)
            case "system":
                passing = message.clear_at == "next_user_message"
                if not (passing and users and users[-1] > number):
                    yield {"role": "system", "content": _system(message, number)}
            case "user":
                yield from _user(message, number)


def _system_text(blocks: Iterable[TextBlock]) -> str:
    return "".join(_BILLING.sub("", block.text) for block in blocks)


def _assistant(message: Message, number: int) -> dict[str, Any]:
    made: dict[str, Any] = {"role": "assistant", "content": ""}
    thoughts = []
    calls: list[dict[str, Any]] = []
    for place, block in enumerate(message.content or ()):
        match block:
            case TextBlock():
                made["content"] += block.text
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case RedactedThinkingBlock() | FallbackBlock():
                pass
            case ToolUseBlock():
                function = {"name": block.name, "arguments": block.input or {}}
                calls.append({"id": block.id, "type": "function", "function": function})
            case ToolAdditionBlock() | ToolRemovalBlock():
                raise _misplaced(block, "system", number, place)
            case _:
                raise _misplaced(block, "user", number, place)
    if any(thoughts):
        made["reasoning_content"] = "".join(thoughts)
    if calls:
        made["tool_calls"] = calls
    return made


def _user(message: Message, number: int) -> Iterator[dict[str, Any]]:
    texts = []
    results = 0
    for place, block in enumerate(message.content or ()):
        match block:
            case TextBlock():
                texts.append(block.text)
            case DocumentBlock() | SearchResultBlock():
                text = _document(block) if isinstance(block, DocumentBlock) else _found(block)
                if text is None:
                    raise _unreadable(block.type, number, place)
                texts.append(f"{text}\n\n")
            case ImageBlock():
                raise _unreadable(block.type, number, place)
            case ToolResultBlock():
                results += 1
                content = _result(block)
                yield {
                    "role": "tool",
                    "tool_call_id": block.tool_use_id,
                    "content": f"Error: {content}" if block.is_error else content,
                }
            case ToolAdditionBlock() | ToolRemovalBlock():
                raise _misplaced(block, "system", number, place)
            case _:
                raise _misplaced(block, "assistant", number, place)
    if texts or not results:
        yield {"role": "user", "content": "".join(texts)}


def _result(block: ToolResultBlock) -> str:
    """The text of a tool's result. If all of it is text, the texts are joined with nothing in
    between; otherwise each part stands in a line of its own."""
    parts = block.content or ()
    between = "" if all(isinstance(part, TextBlock) for part in parts) else "\n"
    return between.join(_result_text(part) for part in parts)


def _result_text(part: ResultBlock) -> str:
    match part:
        case TextBlock():
            return part.text
        case ImageBlock():
            return left_out("image")
        case DocumentBlock():
            return _document(part, notes=True) or left_out("document")
        case SearchResultBlock():
            return _found(part)
        case ToolReferenceBlock():
            return f"The tool {part.tool_name} can be called now."


def _document(block: DocumentBlock, *, notes: bool = False) -> str | None:
    """The text of a document, below its title and its context; None if it is no text. ``notes``
    says that pictures in it become notes; otherwise a document with a picture is no text."""
    match block.source:
        case PlainTextSource(data=text):
            pass
        case ContentSource(content=parts):
            if not notes and any(isinstance(part, ImageBlock) for part in parts):
                return None
            text = "".join(
                part.text if isinstance(part, TextBlock) else f"\n{left_out('image')}\n"
                for part in parts
            )
        case _:
            return None
    return "\n\n".join(part for part in (block.title, block.context, text) if part)


def _found(block: SearchResultBlock) -> str:
    return f"{block.title}\n{block.source}\n\n{_text(block.content)}"


def _system(message: Message, number: int) -> str:
    """The text of a system message; tools that it adds and removes are named in lines of their
    own."""
    texts, lines = [], []
    for place, block in enumerate(message.content or ()):
        match block:
            case TextBlock():
                texts.append(block)
            case ToolAdditionBlock(tool=ToolDefinition(definition=TypedTool())):
                pass
            case ToolAdditionBlock() | ToolRemovalBlock():
                lines.append(_tool_change(block))
            case ToolResultBlock() | ToolUseBlock() | ThinkingBlock() | RedactedThinkingBlock():
                raise _misplaced(block, "user or assistant", number, place)
            case _:
                raise _misplaced(block, "user", number, place)
    return "\n".join([text for text in [_system_text(texts)] if text] + lines)


def _tool_change(block: ToolAdditionBlock | ToolRemovalBlock) -> str:
    tool = block.tool.definition if isinstance(block.tool, ToolDefinition) else block.tool
    change = "can be called now" if block.type == "tool_addition" else "can no longer be called"
    return f"The tool {tool.name} {change}."


def _misplaced(block: Any, role: str, number: int, place: int) -> InvalidRequest:
    param = f"messages[{number}].content[{place}]"
    return InvalidRequest(
        f"{param}: A {block.type} block belongs in a message of role {role}.", param=param
    )


def _unreadable(kind: str, number: int, place: int) -> InvalidRequest:
    param = f"messages[{number}].content[{place}]"
    return InvalidRequest(
        f"{param}: This model does not support {kind} input: it reads text only. Leave the {kind} "
        "out, or put its content into words.",
        param=param,
    )


def _text(blocks: Iterable[TextBlock]) -> str:
    return "".join(block.text for block in blocks)


def _template_kwargs(request: PromptFields) -> dict[str, Any]:
    """The variables of the model's chat template that the request's ``thinking`` and ``effort`` ask
    for, or that it sets itself. If there are none, the template's defaults decide whether the model
    thinks."""
    kwargs: dict[str, Any] = {}
    thinking = request.thinking
    if thinking is not None:
        if (thinking.type == "enabled") != (thinking.budget_tokens is not None):
            raise InvalidRequest(
                "thinking.budget_tokens goes with type enabled, and with it alone.",
                param="thinking.budget_tokens",
            )
        # A model that cannot think between calls of tools alone does not think.
        kwargs["enable_thinking"] = thinking.type in ("enabled", "adaptive")
        if thinking.budget_tokens is not None:
            kwargs["thinking_budget"] = thinking.budget_tokens
    if request.output_config is not None and request.output_config.effort is not None:
        kwargs["reasoning_effort"] = request.output_config.effort
    return kwargs | (request.chat_template_kwargs or {})
