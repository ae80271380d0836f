"""Answers of OpenAI's responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from mayfly_server.api.responses.request import Format, FunctionTool, NamedFunction
from mayfly_server.api.schemas.base import Answer
from mayfly_server.api.schemas.completions import TokenLogprob

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(Answer):
    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)]
    logprobs: list[TokenLogprob]


class OutputReasoningText(Answer):
    type: Literal["reasoning_text"]
    text: str


class OutputMessage(Answer):
    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoning(Answer):
    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: Annotated[list[Any], Field(max_length=0)]
    content: list[OutputReasoningText]
    encrypted_content: None


class OutputFunctionCall(Answer):
    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class InputTokensDetails(Answer):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(Answer):
    reasoning_tokens: int


class ResponseUsage(Answer):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(Answer):
    reason: Literal["max_output_tokens"]


class ResponseError(Answer):
    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class ReasoningConfig(Answer):
    effort: Annotated[Any, Field(description="As in the request.")]
    summary: Literal["auto"] | None


class TextFormat(Answer):
    format: Format
    verbosity: Literal["medium"]


Item = Annotated[OutputMessage | OutputReasoning | OutputFunctionCall, Field(discriminator="type")]


class ResponseAnswer(Answer):
    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    output: list[Item]
    usage: ResponseUsage | None

    background: Literal[False]
    conversation: None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None
    prompt_cache_key: str | None
    reasoning: ReasoningConfig
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: Literal[False]
    temperature: float
    text: TextFormat
    tool_choice: Literal["none", "auto", "required"] | NamedFunction
    tools: list[FunctionTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    user: str | None


class _Event(Answer):
    sequence_number: Annotated[int, Field(description="From 0, without gaps.")]


class ResponseEvent(_Event):
    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: ResponseAnswer


class ItemEvent(_Event):
    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: Item


class _InItem(_Event):
    item_id: str
    output_index: int


class _InPart(_InItem):
    content_index: int


class PartEvent(_InPart):
    type: Literal["response.content_part.added", "response.content_part.done"]
    part: Annotated[OutputText | OutputReasoningText, Field(discriminator="type")]


class TextDelta(_InPart):
    type: Literal["response.output_text.delta"]
    delta: str
    logprobs: list[TokenLogprob]


class TextDone(_InPart):
    type: Literal["response.output_text.done"]
    text: str
    logprobs: list[TokenLogprob]


class ReasoningDelta(_InPart):
    type: Literal["response.reasoning_text.delta"]
    delta: str


class ReasoningDone(_InPart):
    type: Literal["response.reasoning_text.done"]
    text: str


class ArgumentsDelta(_InItem):
    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDone(_InItem):
    type: Literal["response.function_call_arguments.done"]
    arguments: str


ResponsesEvent = Annotated[
    ResponseEvent
    | ItemEvent
    | PartEvent
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone,
    Field(discriminator="type"),
]

EVENTS = """\
event: response.output_text.delta
data: {"type":"response.output_text.delta","sequence_number":4,"item_id":"msg_1_0",\
"output_index":0,"content_index":0,"delta":"Paris.","logprobs":[]}

"""
