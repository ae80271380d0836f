"""The messages and the tools of a request to Anthropic's API: content blocks by their type, and the
two kinds of tools.

A field without an effect on the prompt is a :data:`Hint`, such as marks where to cache, or what an
answer of Anthropic's server holds beside its text.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag

from mayfly_server.api.request_fields import Hint, Strict, ToolName, Unsupported, refused


def _as_blocks(value: Any) -> Any:
    """Reads a message's content that is a plain text as a list of one text block; returns any other
    content unchanged."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class TextBlock(Strict):
    type: Literal["text"]
    text: str
    cache_control: Hint = None
    citations: Hint = None


class Citations(Strict):
    enabled: Annotated[
        None, BeforeValidator(refused("Answers of this server cite nothing", but=(False,)))
    ] = None


class ImageBlock(Strict):
    """A picture. In the result of a tool, a note takes its place, because models here read text
    only; elsewhere it is refused."""

    type: Literal["image"]
    source: dict[str, Any]
    cache_control: Hint = None
    transformations: Hint = None


class PlainTextSource(Strict):
    type: Literal["text"]
    data: str
    media_type: str | None = None


class ContentSource(Strict):
    type: Literal["content"]
    content: Annotated[
        list[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]],
        BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextBlock]),
    ]


class BinarySource(BaseModel):
    """A document that is no text, or not in the request."""

    type: Literal["base64", "url", "file"]


class DocumentBlock(Strict):
    """A document. One that is text is read; any other is like a picture."""

    type: Literal["document"]
    source: Annotated[PlainTextSource | ContentSource | BinarySource, Field(discriminator="type")]
    title: str | None = None
    context: str | None = None
    citations: Citations | None = None
    cache_control: Hint = None


class SearchResultBlock(Strict):
    """A text that the client found, with its title and its place."""

    type: Literal["search_result"]
    content: list[TextBlock]
    source: str
    title: str
    citations: Citations | None = None
    cache_control: Hint = None


class ToolReferenceBlock(Strict):
    """The name of a tool that a search for tools found; the tool is part of the prompt then, even
    if its loading was deferred."""

    type: Literal["tool_reference"]
    tool_name: ToolName
    cache_control: Hint = None


class FallbackBlock(BaseModel):
    """A mark, in an earlier answer of another server, that a second model went on; ignored."""

    type: Literal["fallback"]


class ThinkingBlock(Strict):
    """The model's reasoning in an earlier answer, sent back by the client. The signature is
    ignored."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Strict):
    """Encrypted reasoning that another server produced; ignored."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Strict):
    type: Literal["tool_use"]
    id: str
    name: ToolName
    input: dict[str, Any] | None
    cache_control: Hint = None
    caller: Hint = None
    toolset_name: Unsupported = None


TextBlocks = Annotated[
    list[TextBlock], BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextBlock])
]


ResultBlock = Annotated[
    TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock,
    Field(discriminator="type"),
]


class ToolResultBlock(Strict):
    type: Literal["tool_result"]
    tool_use_id: str
    content: (
        Annotated[
            list[ResultBlock],
            BeforeValidator(_as_blocks, json_schema_input_type=str | list[ResultBlock]),
        ]
        | None
    ) = None
    is_error: bool | None = None
    cache_control: Hint = None
    toolset_name: Unsupported = None


class AnthropicTool(Strict):
    """A function that the client defines and the model may call. One whose loading is deferred is
    part of the prompt as soon as a message refers to it."""

    name: ToolName
    input_schema: dict[str, Any]
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
    cache_control: Hint = None
    eager_input_streaming: Hint = None
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None
    input_examples: Annotated[list[dict[str, Any]], Field(max_length=64)] | None = None


class TypedTool(BaseModel):
    """A tool that Anthropic defines, by its type: one that its server runs is left out of the
    prompt if the model may call others, and refused otherwise; one that the client runs is
    refused, because its schema is not part of the request."""

    type: str
    name: str | None = None


def _tool_kind(tool: Any) -> str:
    """Tells tools with a schema of the client's from those that Anthropic defines."""
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    typed = isinstance(kind, str) and kind not in ("custom", "function")
    if isinstance(tool, dict):
        return "typed" if typed and tool.get("input_schema") is None else "custom"
    return "typed" if isinstance(tool, TypedTool) else "custom"


Tool = Annotated[
    Annotated[AnthropicTool, Tag("custom")] | Annotated[TypedTool, Tag("typed")],
    Discriminator(_tool_kind),
]


class ChangedTool(Strict):
    type: Literal["tool_reference"]
    name: ToolName


class ToolDefinition(Strict):
    type: Literal["tool_definition"]
    definition: Tool


class ToolAdditionBlock(Strict):
    """Offers the model another tool from here on, in a system message. The tool is declared in the
    request's ``tools``, or in the block."""

    type: Literal["tool_addition"]
    tool: Annotated[ChangedTool | ToolDefinition, Field(discriminator="type")]
    cache_control: Hint = None


class ToolRemovalBlock(Strict):
    """Withdraws a tool from here on, in a system message."""

    type: Literal["tool_removal"]
    tool: ChangedTool
    cache_control: Hint = None


Block = Annotated[
    TextBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | ToolAdditionBlock
    | ToolRemovalBlock
    | FallbackBlock,
    Field(discriminator="type"),
]


class Message(Strict):
    """A message. A system message whose ``clear_at`` is ``next_user_message`` is part of the prompt
    until a message of the user's follows."""

    role: Literal["user", "assistant", "system"]
    content: (
        Annotated[
            list[Block], BeforeValidator(_as_blocks, json_schema_input_type=str | list[Block])
        ]
        | None
    )
    clear_at: Literal["next_user_message", "never"] | None = None
    output_config: Hint = None
