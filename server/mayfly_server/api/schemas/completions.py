"""Answers of chat completions and completions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mayfly_server.api.schemas.base import Answer
from mayfly_server.api.schemas.errors import ErrorAnswer

FinishReason = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(Answer):
    cached_tokens: int


class CompletionTokensDetails(Answer):
    reasoning_tokens: int


class UsageSoFar(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Usage(UsageSoFar):
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class Logprob(Answer):
    token: str
    logprob: float
    bytes: Annotated[list[int], Field(description="The token's UTF-8, whole or not.")]


class TokenLogprob(Logprob):
    top_logprobs: list[Logprob]


class ChatLogprobs(Answer):
    content: list[TokenLogprob]


class CalledFunction(Answer):
    name: str
    arguments: Annotated[str, Field(description="A JSON object, as text.")]


class ToolCall(Answer):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantAnswer(Answer):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Answer):
    index: int
    message: AssistantAnswer
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class _Completion(Answer):
    id: str
    created: Annotated[int, Field(description="Seconds since 1970.")]
    model: str
    system_fingerprint: str | None
    usage: Usage


class ChatCompletion(_Completion):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class TextLogprobs(Answer):
    """Four lists of the same length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Answer):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason


class TextCompletion(_Completion):
    object: Literal["text_completion"]
    choices: list[TextChoice]


class FunctionPiece(Answer):
    name: str | None = None
    arguments: Annotated[str, Field(description="What this piece adds to the text.")]


class ToolCallPiece(Answer):
    """The first piece of a call has its id, type and name; the others have none of them."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionPiece


class Gained(Answer):
    """What is new, and nothing else. A choice's first chunk has the role."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallPiece] | None = None


class ChatChunkChoice(Answer):
    index: int
    delta: Gained
    logprobs: ChatLogprobs | None
    finish_reason: Annotated[
        FinishReason | None, Field(description="In the last chunk of a choice, and there alone.")
    ]


class _Chunk(Answer):
    id: str
    created: int
    model: str
    system_fingerprint: str | None
    usage: Annotated[
        Usage | UsageSoFar | None,
        Field(
            description="With include_usage: null, or with continuous_usage_stats what was used so "
            "far, but in a last chunk, which has no choices. Otherwise it is not there."
        ),
    ] = None


class ChatCompletionChunk(_Chunk):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class TextChunkChoice(Answer):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None


class TextCompletionChunk(_Chunk):
    object: Literal["text_completion"]
    choices: list[TextChunkChoice]


ChatEvent = ChatCompletionChunk | ErrorAnswer
TextEvent = TextCompletionChunk | ErrorAnswer

CHAT_EVENTS = """\
data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m",\
"system_fingerprint":"fp_1","choices":[{"index":0,"delta":{"role":"assistant","content":""},\
"logprobs":null,"finish_reason":null}]}

data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m",\
"system_fingerprint":"fp_1","choices":[{"index":0,"delta":{"content":"Paris."},"logprobs":null,\
"finish_reason":null}]}

data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m",\
"system_fingerprint":"fp_1","choices":[{"index":0,"delta":{},"logprobs":null,\
"finish_reason":"stop"}]}

data: [DONE]

"""
TEXT_EVENTS = """\
data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"m",\
"system_fingerprint":"fp_1","choices":[{"index":0,"text":" Paris.","logprobs":null,\
"finish_reason":"stop"}]}

data: [DONE]

"""
