"""The bodies of Anthropic's ``POST /v1/messages`` and ``POST /v1/messages/count_tokens``.

As in OpenAI's requests, types are strict, and fields that ask for something this server does not
support are refused. Fields that are only hints (where to cache, whom to bill, which part of the
conversation may be cleared to save tokens) are accepted, and so is what an answer of Anthropic's
server holds beside its text.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from mayfly_server.api.anthropic.messages_content import Message, TextBlocks, Tool
from mayfly_server.api.request_fields import (
    MAX_MESSAGES,
    MAX_STOPS,
    ChatsAlone,
    Count,
    Hint,
    NotStored,
    Number,
    OneAnswer,
    OtherToolChoice,
    OtherTools,
    SamplingFields,
    SpecialsInChats,
    Strict,
    TemplateKwargs,
    ToolName,
    Unsupported,
    refused,
)

NO_COMPACTION = "This server summarizes no conversations; have the client do it"


def _no_container(value: Any) -> Any:
    """Refuses a place for Anthropic's server to run code in, unless it is described by nothing."""
    described = value.values() if isinstance(value, dict) else [value]
    for each in described:
        refused("This server runs no code; have the client do it")(each)


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

    chat_template_kwargs: TemplateKwargs | None = None
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


OtherMessages = Annotated[None, BeforeValidator(refused("Use messages instead"))]
OtherLength = Annotated[None, BeforeValidator(refused("Use max_tokens instead", but=(-1,)))]
OtherFormat = Annotated[
    None, BeforeValidator(refused("Use output_config.format instead", but=({"type": "text"},)))
]
OtherThinking = Annotated[None, BeforeValidator(refused("Use thinking instead"))]


class MessagesRequest(SamplingFields, PromptFields):
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
            Field(max_length=MAX_STOPS),
        ]
        | None
    ) = None
    temperature: Annotated[Number, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None

    metadata: Hint = None
    service_tier: Hint = None
    diagnostics: Hint = None
    fallbacks: Hint = None
    fallback_credit_token: Hint = None

    container: Annotated[None, BeforeValidator(_no_container)] = None
    inference_geo: Unsupported = None
    compaction: Annotated[None, BeforeValidator(refused(NO_COMPACTION))] = None

    # Fields of other APIs that would change the answer.
    input: OtherMessages = None
    prompt: OtherMessages = None
    instructions: Annotated[None, BeforeValidator(refused("Use system instead"))] = None
    previous_response_id: NotStored = None
    conversation: NotStored = None
    functions: OtherTools = None
    function_call: OtherToolChoice = None
    parallel_tool_calls: Annotated[
        None,
        BeforeValidator(refused("Use tool_choice.disable_parallel_tool_use instead", but=(True,))),
    ] = None
    max_completion_tokens: OtherLength = None
    max_output_tokens: OtherLength = None
    max_new_tokens: OtherLength = None
    n_predict: OtherLength = None
    response_format: OtherFormat = None
    guided_json: OtherFormat = None
    guided_regex: OtherFormat = None
    guided_choice: OtherFormat = None
    guided_grammar: OtherFormat = None
    structured_outputs: OtherFormat = None
    grammar: OtherFormat = None
    json_schema: OtherFormat = None
    enable_thinking: OtherThinking = None
    stop: Annotated[None, BeforeValidator(refused("Use stop_sequences instead"))] = None
    stop_token_ids: ChatsAlone = None
    min_tokens: ChatsAlone = None
    ignore_eos: ChatsAlone = None
    bad_words: ChatsAlone = None
    allowed_token_ids: ChatsAlone = None
    truncate_prompt_tokens: ChatsAlone = None
    return_token_ids: ChatsAlone = None
    skip_special_tokens: SpecialsInChats = None
    logprobs: ChatsAlone = None
    top_logprobs: ChatsAlone = None
    n: OneAnswer = None
    best_of: OneAnswer = None


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
