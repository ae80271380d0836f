"""The tools of a ``/v1/responses`` request: functions, custom tools (called with a text),
namespaces (groups of both), a search for more tools that the client runs, and tools that OpenAI's
servers run.

A model knows functions with plain names alone. A tool of a namespace is offered to the model as
``namespace__name``, and a custom tool as a function with one argument, ``input``. Calls are given
back to the client as the client knows the tool. Hosted tools, which this server cannot run, are no
part of the prompt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from mayfly_server.api.request_fields import Strict, ToolName, refused
from mayfly_server.errors import InvalidRequest
from mayfly_server.http.body import parse_json
from mayfly_server.http.errors import FIELD_NAME

INPUT = "input"
"""The argument of the function as which a model knows a custom tool."""

HOSTED = frozenset(
    {
        "apply_patch",
        "code_interpreter",
        "computer",
        "computer_use",
        "computer_use_preview",
        "file_search",
        "image_generation",
        "local_shell",
        "mcp",
        "programmatic_tool_calling",
        "shell",
        "tool_search",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    }
)
"""Types of tools that OpenAI's servers run, or that only OpenAI's models know."""

Async = Annotated[
    Literal[False] | None,
    BeforeValidator(refused("Calls are never made in the background here", but=(False,))),
    Field(alias="async"),
]
Callers = Annotated[
    list[Literal["direct", "programmatic"]] | None,
    Field(description="Calls are direct; without that, the tool is no part of the prompt."),
]
Deferred = Annotated[
    bool | None, Field(description="Without effect: the tool is a part of the prompt.")
]


class FunctionTool(Strict):
    type: Literal["function"]
    name: ToolName
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None
    output_schema: Annotated[
        dict[str, Any] | None, Field(description="Accepted, without effect.")
    ] = None
    allowed_callers: Callers = None
    defer_loading: Deferred = None
    async_: Async = None


class CustomTextFormat(Strict):
    type: Literal["text"]


class GrammarFormat(Strict):
    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: str


class CustomTool(Strict):
    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: Annotated[CustomTextFormat | GrammarFormat, Field(discriminator="type")] | None = None
    allowed_callers: Callers = None
    defer_loading: Deferred = None
    async_: Async = None


class NamespaceTool(Strict):
    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: Annotated[
        list[Annotated[FunctionTool | CustomTool, Field(discriminator="type")]],
        Field(max_length=1024),
    ]


class ToolSearch(Strict):
    """A search of the client's, whose result offers more tools to the model."""

    type: Literal["tool_search"]
    execution: Literal["client"]
    description: str | None = None
    parameters: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        return self.type


ClientTool = FunctionTool | CustomTool | ToolSearch
"""A tool that the client runs."""


class HostedTool(BaseModel):
    """A tool that this server cannot run, with any fields: left out of the prompt."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Annotated[str, WithJsonSchema({"enum": sorted(HOSTED)})]


OWN = ("function", "custom", "namespace")


def _tool_tag(value: Any) -> str | None:
    if not isinstance(value, dict):
        value = vars(value) if isinstance(value, BaseModel) else {}
    kind = value.get("type")
    if kind in OWN or (kind == "tool_search" and value.get("execution") == "client"):
        return str(kind)
    return "hosted" if isinstance(kind, str) else None


Tool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[ToolSearch, Tag("tool_search")]
    | Annotated[HostedTool, Tag("hosted")],
    Discriminator(
        _tool_tag,
        custom_error_type="tool_type",
        custom_error_message="A tool is an object with a type",
    ),
]


class NamedTool(Strict):
    type: Literal["function", "custom"]
    name: ToolName
    namespace: ToolName | None = None


class AllowedTools(Strict):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=1024)]


def _not_hosted(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind in HOSTED:
        raise PydanticCustomError("unsupported", "{reason}", {"reason": cannot_run(kind)})
    return value


def _choice_tag(value: Any) -> str | None:
    if isinstance(value, str):
        return "mode"
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return {"function": "tool", "custom": "tool", "allowed_tools": "allowed"}.get(str(kind))


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("mode")]
    | Annotated[NamedTool, Tag("tool")]
    | Annotated[AllowedTools, Tag("allowed")],
    Discriminator(
        _choice_tag,
        custom_error_type="tool_choice",
        custom_error_message='Input should be "none", "auto", "required", or an object of type '
        '"function", "custom" or "allowed_tools"',
    ),
    BeforeValidator(_not_hosted),
]


def cannot_run(kind: str) -> str:
    """The reason why a request that wants a hosted tool is refused."""
    named = kind if FIELD_NAME.fullmatch(kind) else "unknown"
    return f"This server cannot run a tool of type {named}; declare a function in its place"


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool as the client knows it (``namespace`` and ``name``), and its name for the model."""

    known_as: str
    tool: ClientTool
    namespace: str | None = None
    summary: str | None = None
    """The description of the tool's namespace, if the tool is the first of it."""

    def function(self) -> dict[str, Any]:
        """The tool as chat templates take it."""
        tool = self.tool
        made: dict[str, Any] = {"name": self.known_as}
        lead = f"{self.namespace}: {self.summary}" if self.summary else None
        texts = (lead, tool.description, _format(tool) if isinstance(tool, CustomTool) else None)
        if description := "\n\n".join(text for text in texts if text):
            made["description"] = description
        if isinstance(tool, CustomTool):
            made["parameters"] = _parameters(tool)
        else:
            made |= tool.model_dump(exclude_none=True, include={"parameters", "strict"})
        return {"type": "function", "function": made}


def _format(tool: CustomTool) -> str:
    """A description of a custom tool's input. Those of clients may say that the input is no JSON:
    for the model, it is an argument like others."""
    place = f"The text goes into the argument `{INPUT}`."
    match tool.format:
        case GrammarFormat(syntax="lark", definition=grammar):
            return f"{place} This Lark grammar describes it:\n{grammar}"
        case GrammarFormat(definition=expression):
            return f"{place} This regular expression matches it: {expression}"
    return place


def _parameters(tool: CustomTool) -> dict[str, Any]:
    text = {"type": "string"}
    if isinstance(tool.format, GrammarFormat) and tool.format.syntax == "regex":
        text["pattern"] = f"^(?:{tool.format.definition})$"
    return {
        "type": "object",
        "properties": {INPUT: text},
        "required": [INPUT],
        "additionalProperties": False,
    }


class ToolNames:
    """The tools that a request offers to the model, by the names that the model and the client have
    for them.

    ``found`` are tools that items add to the request's, some of them more than once. Raises
    InvalidRequest if two of the request's have the same name.
    """

    def __init__(self, tools: Sequence[Any], found: Sequence[Any]) -> None:
        self.offered: list[OfferedTool] = []
        self.hosted: list[str] = []
        self._by_client: dict[tuple[str | None, str], OfferedTool] = {}
        self._by_model: dict[str, OfferedTool] = {}
        every = [*tools, *found]
        plain = {tool.name for tool in every if isinstance(tool, ClientTool)}
        for number, tool in enumerate(every):
            again = number >= len(tools)
            match tool:
                case FunctionTool() | CustomTool() | ToolSearch():
                    self._offer(OfferedTool(tool.name, tool), again=again)
                case NamespaceTool():
                    summary = tool.description
                    for inner in tool.tools:
                        name = self._unique(joined(tool.name, inner.name), plain)
                        self._offer(OfferedTool(name, inner, tool.name, summary), again=again)
                        summary = None
                case HostedTool():
                    self.hosted.append(tool.type)

    def _unique(self, name: str, plain: Collection[str]) -> str:
        """A name for the model that no other tool has; tools without a namespace keep theirs."""
        unique, number = name, 1
        while unique in plain or unique in self._by_model:
            number += 1
            unique = f"{name}_{number}"
        return unique

    def _offer(self, offered: OfferedTool, *, again: bool) -> None:
        tool = offered.tool
        callers = None if isinstance(tool, ToolSearch) else tool.allowed_callers
        key = (offered.namespace, tool.name)
        if (callers and "direct" not in callers) or (again and key in self._by_client):
            return
        if key in self._by_client:
            raise InvalidRequest("tools: two tools have the same name.", param="tools")
        self.offered.append(offered)
        self._by_client[key] = self._by_model[offered.known_as] = offered

    def known_as(self, namespace: str | None, name: str) -> str:
        """The model's name of a tool that an earlier call names."""
        found = self._by_client.get((namespace or None, name))
        return found.known_as if found else joined(namespace, name)

    def called(self, name: str) -> OfferedTool | None:
        """The tool that the model calls by this name."""
        return self._by_model.get(name)

    def chosen(self, kind: Any, name: Any, namespace: Any) -> OfferedTool | None:
        """The tool that a tool choice names. The namespace may be left out if only one tool has the
        name."""
        named = [one for one in self.offered if (one.tool.type, one.tool.name) == (kind, name)]
        exact = [one for one in named if one.namespace == namespace]
        found = exact or (named if namespace is None else [])
        return found[0] if len(found) == 1 else None


def joined(namespace: str | None, name: str) -> str:
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


_BEGINNING = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_CHARACTERS = re.compile(
    r"(?:[^\"\\]++"
    r"|\\[\"\\/bfnrt]"
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4})*+"
)
"""Characters of a JSON string, each complete; a character beyond U+FFFF is two escapes."""


class CustomInput:
    """Reads a custom tool's input out of the arguments of its function, ``{"input": "..."}``, while
    the model writes them.

    Arguments of another form are given to the tool as they are, at the end: the tool's answer then
    tells the model what is wrong with them.
    """

    def __init__(self) -> None:
        self._unread = ""
        self._begun = False

    def add(self, piece: str) -> str:
        """Takes the next piece of the arguments; returns the text that it adds to the input."""
        self._unread += piece
        if not self._begun:
            beginning = _BEGINNING.match(self._unread)
            if beginning is None:
                return ""
            self._begun = True
            self._unread = self._unread[beginning.end() :]
        found = _CHARACTERS.match(self._unread)
        assert found is not None
        self._unread = self._unread[found.end() :]
        text: str = json.loads(f'"{found[0]}"', strict=False)
        return text

    def end(self) -> str:
        """The text that the end of the arguments adds to the input."""
        if self._begun:
            return ""
        unread, self._unread = self._unread, ""
        try:
            arguments = parse_json(unread)
        except ValueError:
            return unread
        text = arguments.get(INPUT) if isinstance(arguments, dict) else None
        return text if isinstance(text, str) else unread
