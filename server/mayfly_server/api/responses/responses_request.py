"""The body of OpenAI's ``POST /v1/responses`` as pydantic models.

The server stores nothing between requests, so fields that refer to an earlier response, a stored
conversation or a stored prompt are refused. A client sends its whole conversation each time, with
the items of earlier answers unchanged.
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
    refused,
)

_STATELESS = "Nothing is stored here between requests; send the whole conversation as input"

Status = Literal["in_progress", "completed", "incomplete"]
Stored = Annotated[None, BeforeValidator(refused(_STATELESS))]


def _as_parts(value: Any) -> Any:
    """Reads an item's content that is a plain text as a list of one text part; returns any other
    content unchanged."""
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


def _as_items(value: Any) -> Any:
    """Completes the shorthand forms of ``input``: a plain text becomes one user message, and an
    item with a role but no type becomes a message."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        return value
    return [
        {"type": "message", **item} if isinstance(item, dict) and "role" in item else item
        for item in value
    ]


class InputText(Strict):
    type: Literal["input_text"]
    text: str


class EarlierOutputText(Strict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class Refusal(Strict):
    type: Literal["refusal"]
    refusal: str


Part = Annotated[InputText | EarlierOutputText | Refusal, Field(discriminator="type")]
Parts = Annotated[list[Part], BeforeValidator(_as_parts, json_schema_input_type=str | list[Part])]


class MessageItem(Strict):
    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts
    id: str | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCallItem(Strict):
    type: Literal["function_call"]
    call_id: str
    name: ToolName
    arguments: str
    id: str | None = None
    status: Status | None = None
    caller: Annotated[dict[str, Any] | None, Field(description="Accepted, without effect.")] = None
    namespace: Unsupported = None
    async_: Annotated[Literal[False] | None, Field(alias="async")] = None


class FunctionCallOutputItem(Strict):
    type: Literal["function_call_output"]
    call_id: str
    output: Parts
    id: str | None = None
    status: Status | None = None


class ReasoningText(Strict):
    type: Literal["reasoning_text"]
    text: str


class SummaryText(Strict):
    type: Literal["summary_text"]
    text: str


class ReasoningItem(Strict):
    type: Literal["reasoning"]
    summary: list[SummaryText] | None = None
    content: list[ReasoningText] | None = None
    id: str | None = None
    status: Status | None = None
    encrypted_content: Annotated[
        str | None, Field(description="Encrypted reasoning of another server; ignored.")
    ] = None


Item = Annotated[
    MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem,
    Field(discriminator="type"),
]


class FunctionTool(Strict):
    type: Literal["function"]
    name: ToolName
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class NamedFunction(Strict):
    type: Literal["function"]
    name: ToolName


class PlainTextFormat(Strict):
    type: Literal["text"]


class JsonObjectFormat(Strict):
    type: Literal["json_object"]


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


Format = Annotated[
    PlainTextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


class TextConfig(Strict):
    format: Format | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Strict):
    """Options for the model's reasoning. The server returns the reasoning text itself, as the
    content of reasoning items, never a summary."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class ResponsesStreamOptions(Strict):
    include_obfuscation: Literal[False] | None = None


def _no_background(value: Any) -> Any:
    return None if value is False else refused(_STATELESS)(value)


class ResponsesRequest(Strict):
    """The body of OpenAI's ``POST /v1/responses``."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"input": "What is the capital of France?", "max_output_tokens": 64},
                {
                    "instructions": "Be brief.",
                    "input": [{"role": "user", "content": "What is the capital of France?"}],
                    "reasoning": {"effort": "low"},
                    "stream": True,
                },
            ]
        }
    )

    model: str | None = None
    input: Annotated[
        list[Item],
        BeforeValidator(_as_items, json_schema_input_type=str | list[Item]),
        Field(min_length=1, max_length=MAX_MESSAGES),
    ]
    instructions: str | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    max_output_tokens: Count | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=1024)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = (
        None
    )
    truncation: Literal["disabled"] | None = None

    # Hints without effect on the answer.
    metadata: dict[str, Annotated[str, Field(max_length=512)]] | None = None
    prompt_cache_key: Annotated[
        str | None, Field(description="Requests with the same key go to the same worker.")
    ] = None
    prompt_cache_retention: Literal["in_memory"] | None = None
    safety_identifier: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    user: str | None = None

    store: Annotated[
        Literal[False] | None,
        BeforeValidator(lambda v: v if v is not True else refused(_STATELESS)(v)),
    ] = None
    previous_response_id: Stored = None
    conversation: Stored = None
    prompt: Stored = None
    background: Annotated[Literal[False] | None, BeforeValidator(_no_background)] = None
    access_programs: Unsupported = None
    background_options: Unsupported = None
    context_management: Unsupported = None
    image: Unsupported = None
    max_tool_calls: Unsupported = None
    moderation: Unsupported = None
    prompt_cache_options: Unsupported = None
