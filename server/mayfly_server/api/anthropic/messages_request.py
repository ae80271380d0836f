"""The bodies of Anthropic's ``POST /v1/messages`` and ``POST /v1/messages/count_tokens``.

As in OpenAI's requests, types are strict, and fields that ask for something this server does not
support are refused. Fields that are only hints (where to cache, whom to bill, which part of the
conversation may be cleared to save tokens) are accepted, and so is what an answer of Anthropic's
server holds beside its text.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from mayfly_server.api.request_fields import (
    MAX_MESSAGES,
    Count,
    Hint,
    Number,
    Strict,
    ToolName,
    Unsupported,
    refused,
)

MAX_STOP_SEQUENCES = 64
NO_COMPACTION = "This server summarizes no conversations; have the client do it"


def _as_blocks(value: Any) -> Any:
    """Reads a message's content that is a plain text as a list of one text block; returns any other
    content unchanged."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class TextBlock(Strict):
    type: Literal["text"]
    text: str
    cache_control: Hint = None
    citations: Hint = None


def _no_container(value: Any) -> Any:
    """Refuses a place for Anthropic's server to run code in, unless it is described by nothing."""
    described = value.values() if isinstance(value, dict) else [value]
    for each in described:
        refused("This server runs no code; have the client do it")(each)


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


Block = Annotated[
    TextBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
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


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Strict):
    """The model's reasoning: on or off, and shown or hidden. ``budget_tokens`` is passed to the
    chat template as ``thinking_budget``; the server does not enforce the budget."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted", "updates"] | None = None
    block_binding: Hint = None


class OutputFormat(Strict):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Strict):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None
    task_budget: Hint = None


class ClearingEdit(BaseModel):
    """Clears old thoughts or tool results out of the conversation, to save tokens; accepted,
    without effect."""

    type: Literal["clear_thinking_20251015", "clear_tool_uses_20250919"]


class CompactingEdit(BaseModel):
    """Replaces old turns of a long conversation by a summary; refused."""

    type: Literal["compact_20260112"]


class ContextManagement(Strict):
    """Edits of the conversation before the model reads it."""

    edits: list[Annotated[ClearingEdit | CompactingEdit, Field(discriminator="type")]] | None = None


class PromptFields(Strict):
    """The fields that determine the prompt, shared by ``/v1/messages`` and
    ``/v1/messages/count_tokens``."""

    model: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: TextBlocks | None = None
    tools: Annotated[list[Tool], Field(max_length=1024)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: Annotated[
        OutputFormat | None, Field(description="Older name of output_config.format.")
    ] = None

    cache_control: Hint = None
    context_management: ContextManagement | None = None
    mcp_servers: Annotated[
        None,
        BeforeValidator(
            refused("This server connects to none; have the client do it, and declare their tools")
        ),
    ] = None
    thread: Annotated[
        dict[str, Any] | None,
        Field(description="Refused, with details by which SDKs go on without."),
    ] = None
    speed: Hint = None
    user_profile_id: Hint = None
    billing_policy: Hint = None


class MessagesRequest(PromptFields):
    """The body of ``POST /v1/messages``."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "max_tokens": 64,
                    "system": "Be brief.",
                    "messages": [{"role": "user", "content": "What is the capital of France?"}],
                },
            ]
        }
    )

    max_tokens: Count
    stream: bool | None = None
    stop_sequences: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=4096)]],
            Field(max_length=MAX_STOP_SEQUENCES),
        ]
        | None
    ) = None
    temperature: Annotated[Number, Field(ge=0, le=1)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None

    metadata: Hint = None
    service_tier: Hint = None
    diagnostics: Hint = None
    fallbacks: Hint = None
    fallback_credit_token: Hint = None

    container: Annotated[None, BeforeValidator(_no_container)] = None
    inference_geo: Unsupported = None
    compaction: Annotated[None, BeforeValidator(refused(NO_COMPACTION))] = None


class CountTokensRequest(PromptFields):
    """The body of ``POST /v1/messages/count_tokens``."""

    compaction: Hint = None

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"messages": [{"role": "user", "content": "What is the capital of France?"}]},
            ]
        }
    )
