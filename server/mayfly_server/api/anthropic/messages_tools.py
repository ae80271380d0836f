"""The tools of an Anthropic request, in the form that chat templates take.

::

    custom, with an input_schema        a function for the model to call
    of those, with deferred loading     left out until a message refers to the tool, adds it or has
                                        a call of it
    of those, removed by a message      left out
    of those, only for code to call     left out: there is no code that could call them
    run by Anthropic's server           left out beside tools that the model may call, since the
                                        declaration alone asks for nothing; otherwise refused
    run by the client, with a schema    refused: the schema is known to Anthropic's models alone
    of Anthropic's
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from mayfly_protocol.requests import ToolChoice as Mode
from mayfly_server.api.anthropic.messages_content import (
    AnthropicTool,
    ChangedTool,
    ToolAdditionBlock,
    ToolDefinition,
    ToolReferenceBlock,
    ToolRemovalBlock,
    ToolResultBlock,
    ToolUseBlock,
    TypedTool,
)
from mayfly_server.api.anthropic.messages_request import PromptFields
from mayfly_server.errors import InvalidRequest

_HOSTED = re.compile(
    r"(web_search|web_fetch|code_execution|advisor|tool_search_tool(_regex|_bm25)?)(_\d{8})?"
    r"|mcp_toolset"
)
"""Types of tools that Anthropic's server runs."""
_SEARCH = "tool_search_tool"
_OF_CLIENTS = re.compile(r"(bash|text_editor|computer|memory|(computer|browser)_toolset)_\d{8}")
"""Types of tools that clients run, with a schema of Anthropic's."""
_MODES: dict[str, Mode] = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}


def prompt_tools(request: PromptFields) -> tuple[dict[str, Any], ...]:
    """The tools that the model may call, as OpenAI's tool objects. Raises InvalidRequest for tools
    that this server does not have."""
    hosted: list[tuple[str, TypedTool]] = []
    tools: dict[str, AnthropicTool] = {}
    for place, tool in _declared(request):
        if isinstance(tool, AnthropicTool):
            if tool.name in tools and place.startswith("tools"):
                raise InvalidRequest("tools: two tools have the same name.", param="tools")
            tools[tool.name] = tool
        elif _HOSTED.fullmatch(tool.type):
            hosted.append((place, tool))
        else:
            raise _unknown(place, tool)
    tools = {name: tool for name, tool in tools.items() if _called_by_the_model(tool)}
    choice = request.tool_choice
    mode = choice.type if choice else "auto"
    for place, tool in hosted:
        forced = mode == "tool" and choice is not None and choice.name == tool.name
        if forced or (mode != "none" and not tools):
            raise InvalidRequest(
                f"{place}.type: {tool.type} is a tool that Anthropic's server runs; this server "
                "runs none. Declare a tool of your own, with an input_schema.",
                param=f"{place}.type",
            )
    searched = any(tool.type.startswith(_SEARCH) for _, tool in hosted)
    offered = _offered(tools, request, searched=searched)
    return tuple(_function(tool) for name, tool in tools.items() if name in offered)


def _declared(request: PromptFields) -> Iterator[tuple[str, AnthropicTool | TypedTool]]:
    """Each tool that the request or one of its messages declares, with its place."""
    for number, tool in enumerate(request.tools or ()):
        yield f"tools[{number}]", tool
    for number, message in enumerate(request.messages):
        for place, block in enumerate(message.content or ()):
            if isinstance(block, ToolAdditionBlock) and isinstance(block.tool, ToolDefinition):
                at = f"messages[{number}].content[{place}].tool.definition"
                yield at, block.tool.definition


def tool_choice(
    request: PromptFields, tools: tuple[dict[str, Any], ...]
) -> tuple[Mode, str | None]:
    """Returns the mode in which the model has to use ``tools``, and the name of the tool that it
    has to call (None if it may choose)."""
    choice = request.tool_choice
    names = [tool["function"]["name"] for tool in tools]
    if choice is None:
        return "auto", None
    if choice.type == "tool" and choice.name not in names:
        raise InvalidRequest("tool_choice.name: no tool has this name.", param="tool_choice.name")
    if choice.type == "any" and not names:
        raise InvalidRequest("tool_choice: the request has no tools to call.", param="tool_choice")
    if choice.type != "tool" and choice.name:
        raise InvalidRequest(
            "tool_choice.name: only a choice of type tool names one.", param="tool_choice.name"
        )
    return _MODES[choice.type], choice.name or None


def _unknown(place: str, tool: TypedTool) -> InvalidRequest:
    if _OF_CLIENTS.fullmatch(tool.type):
        problem = (
            f"{tool.type} has a schema that only Anthropic's models know. Declare it with a "
            "description and an input_schema instead."
        )
    else:
        problem = "There is no tool of this type here; one of your own needs an input_schema."
    return InvalidRequest(f"{place}.type: {problem}", param=f"{place}.type")


def _called_by_the_model(tool: AnthropicTool) -> bool:
    return not tool.allowed_callers or "direct" in tool.allowed_callers


def _offered(tools: dict[str, AnthropicTool], request: PromptFields, *, searched: bool) -> set[str]:
    """The names of the tools that the model may call at the end of the conversation. ``searched``
    says that the client relies on Anthropic's server to find deferred tools: all are loaded then,
    as they are if there is no tool by which the model could find them."""
    offered = {name for name, tool in tools.items() if not tool.defer_loading}
    if searched or not offered:
        offered = set(tools)
    for block in _blocks(request):
        match block:
            case ToolUseBlock(name=name) | ToolReferenceBlock(tool_name=name):
                offered.add(name)
            case ToolAdditionBlock(tool=ChangedTool(name=name)):
                offered.add(name)
            case ToolAdditionBlock(tool=ToolDefinition(definition=AnthropicTool(name=name))):
                offered.add(name)
            case ToolRemovalBlock(tool=ChangedTool(name=name)):
                offered.discard(name)
    if request.tool_choice and request.tool_choice.name:
        offered.add(request.tool_choice.name)
    return offered


def _blocks(request: PromptFields) -> Iterator[Any]:
    for message in request.messages:
        for block in message.content or ():
            yield block
            if isinstance(block, ToolResultBlock):
                yield from block.content or ()


def _function(tool: AnthropicTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    description = tool.description
    if tool.input_examples:
        examples = "\n".join(json.dumps(each, ensure_ascii=False) for each in tool.input_examples)
        description = f"{description or ''}\n\nExamples of its input:\n{examples}".lstrip()
    if description is not None:
        function["description"] = description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}
