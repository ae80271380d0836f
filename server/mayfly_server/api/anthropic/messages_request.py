"""The bodies of Anthropic's ``POST /v1/messages`` and ``POST /v1/messages/count_tokens``.

As in OpenAI's requests, types are strict, and fields that ask for something this server does not
support are refused. Fields that are only hints (where to cache, whom to bill) are accepted.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from mayfly_server.api.request_fields import (
    MAX_MESSAGES,
    Count,
    Number,
    Strict,
    ToolName,
    Unsupported,
)

MAX_STOP_SEQUENCES = 64


def _as_blocks(value: Any) -> Any:
    """Reads a message's content that is a plain text as a list of one text block; returns any other
    content unchanged."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class CacheControl(Strict):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(Strict):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Annotated[list[Any] | None, Field(max_length=0)] = None


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
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: Annotated[dict[str, Any] | None, Field(description="Accepted, without effect.")] = None
    toolset_name: Unsupported = None


TextBlocks = Annotated[
    list[TextBlock], BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextBlock])
]


class ToolResultBlock(Strict):
    type: Literal["tool_result"]
    tool_use_id: str
    content: TextBlocks | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    toolset_name: Unsupported = None


Block = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]


class Message(Strict):
    role: Literal["user", "assistant", "system"]
    content: Annotated[
        list[Block], BeforeValidator(_as_blocks, json_schema_input_type=str | list[Block])
    ]


class AnthropicTool(Strict):
    """A function that the client defines and the model may call."""

    name: ToolName
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    input_examples: Unsupported = None


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Strict):
    """The model's reasoning: on or off, and shown or hidden. ``budget_tokens`` is passed to the
    chat template as ``thinking_budget``; the server does not enforce the budget."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Strict):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Strict):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Metadata(Strict):
    user_id: str | None = None


class ClearThinking(Strict):
    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(Strict):
    """Edits of the conversation before the model reads it; only edits that leave the conversation
    unchanged are supported."""

    edits: list[ClearThinking] | None = None


class PromptFields(Strict):
    """The fields that determine the prompt, shared by ``/v1/messages`` and
    ``/v1/messages/count_tokens``."""

    model: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: TextBlocks | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=1024)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: Annotated[
        OutputFormat | None, Field(description="Older name of output_config.format.")
    ] = None

    cache_control: CacheControl | None = None
    context_management: ContextManagement | None = None
    speed: Literal["standard"] | None = None
    user_profile_id: str | None = None
    mcp_servers: Annotated[list[Any] | None, Field(max_length=0)] = None


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
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    container: Unsupported = None
    diagnostics: Unsupported = None
    inference_geo: Unsupported = None


class CountTokensRequest(PromptFields):
    """The body of ``POST /v1/messages/count_tokens``."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"messages": [{"role": "user", "content": "What is the capital of France?"}]},
            ]
        }
    )
