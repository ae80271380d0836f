"""The tools of an Anthropic request, in the form that chat templates take.

::

    custom, with an input_schema        a function for the model to call
    of those, with deferred loading     left out until a message refers to the tool or has a call of
                                        it, as the prompt's beginning changes with every tool
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
from mayfly_server.api.anthropic.messages_request import (
    AnthropicTool,
    PromptFields,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
    TypedTool,
)
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
    hosted: list[tuple[int, TypedTool]] = []
    tools: list[AnthropicTool] = []
    for number, tool in enumerate(request.tools or ()):
        if isinstance(tool, AnthropicTool):
            tools.append(tool)
        elif _HOSTED.fullmatch(tool.type):
            hosted.append((number, tool))
        else:
            raise _unknown(number, tool)
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise InvalidRequest("tools: two tools have the same name.", param="tools")
    callable_ = [tool for tool in tools if not tool.allowed_callers or _direct(tool)]
    choice = request.tool_choice
    mode = choice.type if choice else "auto"
    for number, tool in hosted:
        forced = mode == "tool" and choice is not None and choice.name == tool.name
        if forced or (mode != "none" and not callable_):
            raise InvalidRequest(
                f"tools[{number}].type: {tool.type} is a tool that Anthropic's server runs; this "
                "server runs none. Declare a tool of your own, with an input_schema.",
                param=f"tools[{number}].type",
            )
    if not any(tool.type.startswith(_SEARCH) for _, tool in hosted):
        callable_ = _loaded(callable_, request)
    return tuple(_function(tool) for tool in callable_)


def tool_choice(
    request: PromptFields, tools: tuple[dict[str, Any], ...]
) -> tuple[Mode, str | None]:
    """How the model has to use ``tools``, and the name of the one that it has to call, if any."""
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


def _unknown(number: int, tool: TypedTool) -> InvalidRequest:
    if _OF_CLIENTS.fullmatch(tool.type):
        problem = (
            f"{tool.type} has a schema that only Anthropic's models know. Declare it with a "
            "description and an input_schema instead."
        )
    else:
        problem = "There is no tool of this type here; one of your own needs an input_schema."
    return InvalidRequest(f"tools[{number}].type: {problem}", param=f"tools[{number}].type")


def _direct(tool: AnthropicTool) -> bool:
    return "direct" in (tool.allowed_callers or ())


def _loaded(tools: list[AnthropicTool], request: PromptFields) -> list[AnthropicTool]:
    """The tools whose loading is not deferred, or not any more. If all are deferred there is no
    tool by which the model could find others, so all are loaded."""
    if all(tool.defer_loading for tool in tools):
        return tools
    known = set(_referred_to(request))
    return [tool for tool in tools if not tool.defer_loading or tool.name in known]


def _referred_to(request: PromptFields) -> Iterator[str]:
    """The names of the tools that a conversation has a reference to or a call of."""
    if request.tool_choice and request.tool_choice.name:
        yield request.tool_choice.name
    for message in request.messages:
        for block in message.content or ():
            if isinstance(block, ToolUseBlock):
                yield block.name
            elif isinstance(block, ToolResultBlock):
                for inner in block.content or ():
                    if isinstance(inner, ToolReferenceBlock):
                        yield inner.tool_name


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
