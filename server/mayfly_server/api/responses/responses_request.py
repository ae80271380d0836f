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
    ChatsAlone,
    Count,
    EmptyAsNull,
    Hint,
    OneAnswer,
    OtherToolChoice,
    OtherTools,
    SamplingFields,
    SpecialsInChats,
    Strict,
    TemplateKwargs,
    Unsupported,
    refused,
)
from mayfly_server.api.responses.responses_items import Item, as_items
from mayfly_server.api.responses.responses_tools import Tool, ToolChoice

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"
INCLUDES = {
    LOGPROBS,
    ENCRYPTED_REASONING,
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
}
"""Values of ``include``. But for the first two they ask for parts of items that no answer of this
server has."""

_STATELESS = "Nothing is stored here between requests; send the whole conversation as input"
_NOT_STORED = f"{_STATELESS}, and set store to false"

Stored = Annotated[None, BeforeValidator(refused(_STATELESS))]


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
    verbosity: Annotated[
        Literal["low", "medium", "high"] | None,
        EmptyAsNull,
        Field(description="Accepted, without effect."),
    ] = None


Summary = Annotated[Literal["auto", "concise", "detailed"] | None, EmptyAsNull]


class Reasoning(Strict):
    """Options for the model's reasoning. The server returns the reasoning text itself, as the
    content of reasoning items, never a summary."""

    effort: Annotated[
        Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None, EmptyAsNull
    ] = None
    summary: Summary = None
    generate_summary: Summary = None
    context: Hint = None
    mode: Annotated[Literal["standard"] | None, Field(description="Only the usual one.")] = None


class ResponsesStreamOptions(Strict):
    include_obfuscation: Literal[False] | None = None
    include_usage: Annotated[
        bool | None, Field(description="Without effect: the last event has the usage.")
    ] = None


def _not_stored(value: Any) -> Any:
    return value if value is None or value is False else refused(_NOT_STORED)(value)


class PromptCacheOptions(Strict):
    """Options of a cache of OpenAI's. Prompts are always cached here as long as there is room."""

    mode: Hint = None
    ttl: Hint = None
    comparison_response_id: Hint = None
    prewarm: Annotated[
        None,
        BeforeValidator(refused("No prompt is read ahead of its answer here", but=(False,))),
    ] = None


class PromptFields(Strict):
    """The fields of a request that make its prompt."""

    model: str | None = None
    input: Annotated[
        list[Item],
        BeforeValidator(as_items, json_schema_input_type=str | list[Item]),
        Field(min_length=1, max_length=MAX_MESSAGES),
    ]
    instructions: str | None = None
    tools: Annotated[list[Tool], Field(max_length=1024)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    truncation: Annotated[Literal["auto", "disabled"] | None, EmptyAsNull] = None
    previous_response_id: Stored = None
    conversation: Stored = None


class InputTokensRequest(PromptFields):
    """The body of OpenAI's ``POST /v1/responses/input_tokens``."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"input": "What is the capital of France?"}]}
    )

    personality: Hint = None


OtherLength = Annotated[None, BeforeValidator(refused("Use max_output_tokens instead", but=(-1,)))]
OtherFormat = Annotated[
    None, BeforeValidator(refused("Use text.format instead", but=({"type": "text"},)))
]
OtherThinking = Annotated[None, BeforeValidator(refused("Use reasoning.effort instead"))]


class ResponsesRequest(SamplingFields, PromptFields):
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

    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    max_output_tokens: Count | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: list[str] | None = None
    max_tool_calls: Annotated[
        Annotated[int, Field(ge=0)] | None,
        Field(description="Limits calls of hosted tools, of which there are none."),
    ] = None

    # Hints without effect on the answer.
    client_metadata: Hint = None
    metadata: dict[str, Any] | None = None
    priority: Hint = None
    prompt_cache_key: Annotated[
        str | None, Field(description="Requests with the same key go to the same worker.")
    ] = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: Hint = None
    safety_identifier: str | None = None
    service_tier: Hint = None
    user: str | None = None

    store: Annotated[Literal[False] | None, BeforeValidator(_not_stored)] = None
    prompt: Stored = None
    background: Annotated[
        Literal[False] | None, BeforeValidator(refused(_STATELESS, but=(False,)))
    ] = None
    background_options: Annotated[
        None, BeforeValidator(refused(_STATELESS, but=({"completion_window": "soonest"},)))
    ] = None
    context_management: Annotated[
        None,
        BeforeValidator(refused("Conversations are not compacted here; shorten the input instead")),
    ] = None
    image: Annotated[
        None,
        BeforeValidator(
            refused(
                "This model reads text only",
                but=({"context_compression": "auto"}, {"context_compression": "disabled"}),
            )
        ),
    ] = None
    access_programs: Unsupported = None
    moderation: Unsupported = None

    # Fields of other APIs that would change the answer.
    messages: Annotated[None, BeforeValidator(refused("Use input instead"))] = None
    system: Annotated[None, BeforeValidator(refused("Use instructions instead"))] = None
    functions: OtherTools = None
    function_call: OtherToolChoice = None
    max_tokens: OtherLength = None
    max_completion_tokens: OtherLength = None
    max_new_tokens: OtherLength = None
    n_predict: OtherLength = None
    response_format: OtherFormat = None
    output_format: OtherFormat = None
    guided_json: OtherFormat = None
    guided_regex: OtherFormat = None
    guided_choice: OtherFormat = None
    guided_grammar: OtherFormat = None
    structured_outputs: OtherFormat = None
    grammar: OtherFormat = None
    json_schema: OtherFormat = None
    enable_thinking: OtherThinking = None
    thinking: OtherThinking = None
    stop: ChatsAlone = None
    stop_sequences: ChatsAlone = None
    stop_token_ids: ChatsAlone = None
    min_tokens: ChatsAlone = None
    ignore_eos: ChatsAlone = None
    bad_words: ChatsAlone = None
    allowed_token_ids: ChatsAlone = None
    truncate_prompt_tokens: ChatsAlone = None
    return_token_ids: ChatsAlone = None
    skip_special_tokens: SpecialsInChats = None
    logprobs: Annotated[
        None, BeforeValidator(refused(f"Use include: [{LOGPROBS!r}] instead", but=(False,)))
    ] = None
    n: OneAnswer = None
    best_of: OneAnswer = None
