"""The types of the JSON objects in the answers and events of OpenAI's ``POST /v1/responses``."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field

from mayfly_server.api.openai.logprobs import ChatTokenLogprob
from mayfly_server.api.openapi import AnswerObject
from mayfly_server.api.responses.responses_request import Format, Summary
from mayfly_server.api.responses.responses_tools import ToolChoice

ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(AnswerObject):
    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)]
    logprobs: list[ChatTokenLogprob]


class OutputReasoningText(AnswerObject):
    type: Literal["reasoning_text"]
    text: str


OutputPart = Annotated[OutputText | OutputReasoningText, Field(discriminator="type")]


class OutputMessage(AnswerObject):
    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoning(AnswerObject):
    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: Annotated[list[Any], Field(max_length=0)]
    content: list[OutputReasoningText]
    encrypted_content: Annotated[
        str | None,
        Field(
            description="The content once more, if the request includes it: clients that send back "
            "no content send this. It is encoded, and no secret."
        ),
    ]


class CalledNamespace(AnswerObject):
    """The namespace of a tool that is called, if the request has the tool in one."""

    namespace: NotRequired[str]


class OutputFunctionCall(CalledNamespace):
    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class OutputCustomToolCall(CalledNamespace):
    id: str
    type: Literal["custom_tool_call"]
    status: ItemStatus
    call_id: str
    name: str
    input: str


class OutputToolSearchCall(AnswerObject):
    id: str
    type: Literal["tool_search_call"]
    status: ItemStatus
    call_id: str
    execution: Literal["client"]
    arguments: dict[str, Any]


class InputTokensDetails(AnswerObject):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(AnswerObject):
    reasoning_tokens: int


class ResponseUsage(AnswerObject):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(AnswerObject):
    reason: Literal["max_output_tokens"]


class ResponseError(AnswerObject):
    code: Literal[
        "server_error", "rate_limit_exceeded", "invalid_prompt", "context_length_exceeded"
    ]
    message: str


class ReasoningConfig(AnswerObject):
    effort: Annotated[Any, Field(description="As in the request.")]
    summary: Annotated[
        Summary | None,
        Field(description="As in the request; reasoning is returned itself, never a summary."),
    ]


class TextFormat(AnswerObject):
    format: Format
    verbosity: Literal["low", "medium", "high"]


OutputItem = Annotated[
    OutputMessage
    | OutputReasoning
    | OutputFunctionCall
    | OutputCustomToolCall
    | OutputToolSearchCall,
    Field(discriminator="type"),
]


class RequestEcho(AnswerObject):
    """The fields of a response object that repeat the request's parameters."""

    background: Literal[False]
    conversation: None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
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
    tool_choice: ToolChoice
    tools: Annotated[list[dict[str, Any]], Field(description="As in the request.")]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    user: str | None


class ResponseAnswer(RequestEcho):
    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: ResponseStatus
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    output: list[OutputItem]
    usage: ResponseUsage | None


class _Event(AnswerObject):
    sequence_number: Annotated[
        int, Field(description="The event's number in its stream: 0, 1, 2 ...")
    ]


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
    item: OutputItem


class _InItem(_Event):
    item_id: str
    output_index: int


class _InPart(_InItem):
    content_index: int


class PartEvent(_InPart):
    type: Literal["response.content_part.added", "response.content_part.done"]
    part: OutputPart


class TextDelta(_InPart):
    type: Literal["response.output_text.delta"]
    delta: str
    logprobs: list[ChatTokenLogprob]


class TextDone(_InPart):
    type: Literal["response.output_text.done"]
    text: str
    logprobs: list[ChatTokenLogprob]


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


class InputDelta(_InItem):
    type: Literal["response.custom_tool_call_input.delta"]
    delta: str


class InputDone(_InItem):
    type: Literal["response.custom_tool_call_input.done"]
    input: str


ResponsesEvent = Annotated[
    ResponseEvent
    | ItemEvent
    | PartEvent
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
    | InputDelta
    | InputDone,
    Field(discriminator="type"),
]

RESPONSES_EVENTS = """\
event: response.output_text.delta
data: {"type":"response.output_text.delta","sequence_number":4,"item_id":"msg_1_0",\
"output_index":0,"content_index":0,"delta":"Paris.","logprobs":[]}

"""
