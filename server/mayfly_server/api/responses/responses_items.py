"""The items of a ``/v1/responses`` request's ``input``: messages, reasoning, calls of tools and
their results, as pydantic models.

Items of earlier answers come back as they were sent, also those of other servers: calls of tools
that OpenAI's servers run are read as calls with a result. An item that stands for something which
only another server has, such as a reference, is refused.
"""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from mayfly_server.api.request_fields import Hint, Strict, ToolName
from mayfly_server.api.responses.responses_tools import Async, Tool

Status = Annotated[str | None, Field(description="Accepted, without effect.")]


def _as_parts(value: Any) -> Any:
    """Reads an item's content that is a plain text as a list of one text part; returns any other
    content unchanged."""
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


class TextPart(Strict):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    parsed: Hint = None


class Refusal(Strict):
    type: Literal["refusal"]
    refusal: str


class MediaPart(BaseModel):
    """An image, a file or a sound. Accepted only where a tool returned it: a note takes its
    place."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["input_image", "input_file", "input_audio"]


Part = Annotated[TextPart | Refusal | MediaPart, Field(discriminator="type")]
Parts = Annotated[list[Part], BeforeValidator(_as_parts, json_schema_input_type=str | list[Part])]


class _Item(Strict):
    id: str | None = None
    status: Status = None
    created_by: Hint = None


class MessageItem(_Item):
    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts
    phase: Status = None


class _ToolItem(_Item):
    call_id: str
    caller: Hint = None


class _CallItem(_ToolItem):
    name: ToolName
    namespace: ToolName | None = None
    async_: Async = None


class FunctionCallItem(_CallItem):
    type: Literal["function_call"]
    arguments: str
    parsed_arguments: Hint = None


class CustomToolCallItem(_CallItem):
    type: Literal["custom_tool_call"]
    input: str


class ToolOutputItem(_ToolItem):
    type: Literal["function_call_output", "custom_tool_call_output"]
    output: Parts
    name: Hint = None
    namespace: Hint = None


class _SearchItem(_Item):
    call_id: Annotated[
        str | None, Field(description="Null in a search by another server; left out then.")
    ] = None
    execution: Hint = None


class ToolSearchCallItem(_SearchItem):
    type: Literal["tool_search_call"]
    arguments: dict[str, Any]


class ToolSearchOutputItem(_SearchItem):
    type: Literal["tool_search_output"]
    tools: Annotated[list[Tool], Field(max_length=1024)]


class ReasoningText(Strict):
    type: Literal["reasoning_text", "text"]
    text: str


class SummaryText(Strict):
    type: Literal["summary_text"]
    text: str


class ReasoningItem(_Item):
    type: Literal["reasoning"]
    summary: list[SummaryText] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: Annotated[
        str | None,
        Field(description="As this server sent it; encrypted reasoning of another is ignored."),
    ] = None

    @property
    def thought(self) -> str:
        """The reasoning. Some clients, Codex among them, send it back packed alone."""
        content = "".join(part.text for part in self.content or ())
        return content or unpack(self.encrypted_content or "")


_PACKED = "mayfly:"


def pack(thought: str) -> str:
    """The ``encrypted_content`` of a reasoning item. Nothing is encrypted, since the item's content
    has the text as well."""
    return _PACKED + base64.b64encode(thought.encode()).decode()


def unpack(content: str) -> str:
    """The reasoning in an ``encrypted_content``; empty if it is none of this server's."""
    if not content.startswith(_PACKED):
        return ""
    try:
        return base64.b64decode(content.removeprefix(_PACKED), validate=True).decode()
    except ValueError:
        return ""


class AdditionalToolsItem(_Item):
    type: Literal["additional_tools"]
    role: Literal["developer"]
    tools: Annotated[list[Tool], Field(max_length=1024)]


class HostedItem(BaseModel):
    """A call, or the result of a call, of a tool that this server does not have, in an earlier
    answer of another server."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal[
        "apply_patch_call",
        "apply_patch_call_output",
        "code_interpreter_call",
        "computer_call",
        "computer_call_output",
        "file_search_call",
        "image_generation_call",
        "local_shell_call",
        "local_shell_call_output",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "mcp_list_tools",
        "program",
        "program_output",
        "shell_call",
        "shell_call_output",
        "web_search_call",
    ]


_ENCRYPTED = (
    "The conversation in this item is encrypted, and only the server that made it can read it; "
    "send the items that it replaced, or begin a new conversation"
)
UNREADABLE = {
    "item_reference": "Nothing is stored here between requests; set store to false, so that the "
    "client sends whole items instead of references",
    "compaction": _ENCRYPTED,
    "compaction_summary": _ENCRYPTED,
    "context_compaction": _ENCRYPTED,
    "compaction_trigger": "Conversations are not compacted here; ask for a summary in a message",
}


def _readable(value: Any) -> Any:
    """Refuses items that stand for something which only another server has."""
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind in UNREADABLE:
        raise PydanticCustomError("unsupported", "{reason}", {"reason": UNREADABLE[kind]})
    return value


Item = Annotated[
    Annotated[
        MessageItem
        | FunctionCallItem
        | CustomToolCallItem
        | ToolOutputItem
        | ReasoningItem
        | AdditionalToolsItem
        | ToolSearchCallItem
        | ToolSearchOutputItem
        | HostedItem,
        Field(discriminator="type"),
    ],
    BeforeValidator(_readable),
]


def as_items(value: Any) -> Any:
    """Completes the shorthand forms of ``input``: a plain text becomes one user message, an item
    with a role but no type becomes a message, and an id alone a reference."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        return value
    return [_with_type(item) if isinstance(item, dict) else item for item in value]


def _with_type(item: dict[str, Any]) -> dict[str, Any]:
    if item.get("type") is not None:
        return item
    if "role" in item:
        return {**item, "type": "message"}
    return {**item, "type": "item_reference"} if "id" in item else item
