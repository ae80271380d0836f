"""The answers of ``POST /v1/chat/completions``: the chunks of a stream, and the one object of an
answer that is not streamed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, NotRequired, cast

from pydantic import Field

from mayfly_protocol.requests import FinishReason
from mayfly_protocol.serving import Delta, TokenLogprob, ToolCallDelta, Usage
from mayfly_server.api.answer import Head
from mayfly_server.api.openai.logprobs import (
    AnswerLogprobs,
    ChatTokenLogprob,
    PromptLogprobs,
    prompt_logprobs,
)
from mayfly_server.api.openai.usage import (
    ChunkUsage,
    CompletionUsage,
    StreamUsage,
    UsageReport,
    completion_usage,
)
from mayfly_server.api.openapi import AnswerObject
from mayfly_server.errors import ErrorAnswer
from mayfly_server.http import sse


class ChatLogprobs(AnswerObject):
    content: list[ChatTokenLogprob]


class ToolCallFunction(AnswerObject):
    name: str
    arguments: Annotated[str, Field(description="A JSON object, as text.")]


class ChatToolCall(AnswerObject):
    id: str
    type: Literal["function"]
    function: ToolCallFunction


class ChatCompletionMessage(AnswerObject):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ChatToolCall]]


class ChatChoice(AnswerObject):
    index: int
    message: ChatCompletionMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    token_ids: NotRequired[list[int]]


class ChatCompletion(AnswerObject):
    id: str
    object: Literal["chat.completion"]
    created: Annotated[int, Field(description="Seconds since 1970.")]
    model: str
    system_fingerprint: str | None
    choices: list[ChatChoice]
    usage: CompletionUsage
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptLogprobs]


class ToolCallFunctionDelta(AnswerObject):
    arguments: Annotated[str, Field(description="The text that this chunk adds.")]
    name: NotRequired[str]


class ChatToolCallDelta(AnswerObject):
    """A piece of a tool call. The call's first piece has its id, type and name; later pieces have
    only more text of the arguments."""

    index: int
    function: ToolCallFunctionDelta
    id: NotRequired[str | None]
    type: NotRequired[Literal["function"]]


class ChatDelta(AnswerObject):
    """The text and tool calls that a chunk of a stream adds to a choice. The choice's first chunk
    also has the role."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ChatToolCallDelta]]


class ChatChunkChoice(AnswerObject):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Annotated[
        FinishReason | None, Field(description="Null except in the last chunk of a choice.")
    ]
    token_ids: NotRequired[list[int]]


class ChatCompletionChunk(AnswerObject):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[ChatChunkChoice]
    usage: NotRequired[ChunkUsage]
    prompt_token_ids: NotRequired[
        Annotated[list[int], Field(description="In the first chunk, if asked for.")]
    ]


ChatEvent = ChatCompletionChunk | ErrorAnswer

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


class ChatChunks(sse.OpenAIEnds):
    """Writes the chunks of a chat completion's stream. A choice's first chunk has the role; its
    last chunk has the finish reason and no text. With ``ids`` the first chunk has the prompt's
    token ids, and chunks have those that they add.

    The fields that all chunks of a stream share are encoded once per stream, because this code runs
    for every generated token.
    """

    def __init__(
        self, head: Head, *, logprobs: bool, usage: UsageReport, ids: bool = False
    ) -> None:
        self._ids = ids
        self._prompt_ids = list(head.prompt_ids[0]) if ids else None
        self._last: ChatCompletionChunk = {
            "id": head.id,
            "object": "chat.completion.chunk",
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.fingerprint,
            "choices": [],
        }
        self._opening = f"data: {sse.encode(self._last).removesuffix(']}')}"
        self._logprobs = logprobs
        self._usage = StreamUsage(usage, head.prompt_tokens)
        self._begun: set[int] = set()
        self._answer_logprobs: defaultdict[int, AnswerLogprobs] = defaultdict(AnswerLogprobs)

    def chunk(self, prompt: int, delta: Delta) -> str:
        self._usage.count(delta)
        chunks = ""
        if delta.choice not in self._begun:
            self._begun.add(delta.choice)
            chunks = self._chunk(delta.choice, {"role": "assistant", "content": ""})
        logprobs = self._answer_logprobs[delta.choice].of_text(delta) if self._logprobs else []
        added = _chat_delta(delta)
        ids = delta.ids if self._ids else ()
        if added or ids:
            chunks += self._chunk(delta.choice, added, logprobs=logprobs, ids=ids)
        if delta.finish is not None:
            chunks += self._chunk(delta.choice, {}, finish=delta.finish)
        return chunks

    def end(self, usage: Usage) -> str:
        if not self._usage.in_last_chunk:
            return sse.DONE
        self._last["usage"] = completion_usage(usage)
        return sse.event(self._last) + sse.DONE

    def _chunk(
        self,
        choice: int,
        delta: ChatDelta,
        *,
        logprobs: Sequence[ChatTokenLogprob] = (),
        finish: FinishReason | None = None,
        ids: Sequence[int] = (),
    ) -> str:
        content: ChatChunkChoice = {
            "index": choice,
            "delta": delta,
            "logprobs": {"content": list(logprobs)} if logprobs else None,
            "finish_reason": finish,
        }
        if ids:
            content["token_ids"] = list(ids)
        closing = self._usage.closing
        if self._prompt_ids is not None:
            first = f'],"prompt_token_ids":{sse.encode(self._prompt_ids)}'
            closing = closing.replace("]", first, 1)
            self._prompt_ids = None
        return f"{self._opening}{sse.encode(content)}{closing}"


def _chat_delta(delta: Delta) -> ChatDelta:
    added: ChatDelta = {}
    if delta.reasoning:
        added["reasoning_content"] = delta.reasoning
    if delta.text:
        added["content"] = delta.text
    calls = [_tool_call_delta(call) for call in delta.tool_calls if call.arguments or call.name]
    if calls:
        added["tool_calls"] = calls
    return added


def _tool_call_delta(call: ToolCallDelta) -> ChatToolCallDelta:
    function: ToolCallFunctionDelta = {"arguments": call.arguments}
    added: ChatToolCallDelta = {"index": call.index, "function": function}
    if call.name is not None:
        function["name"] = call.name
        added["id"] = call.id
        added["type"] = "function"
    return added


@dataclass(slots=True)
class _Choice:
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, ChatToolCall] = field(default_factory=dict)
    ids: list[int] = field(default_factory=list)
    logprobs: list[ChatTokenLogprob] = field(default_factory=list)
    answer_logprobs: AnswerLogprobs = field(default_factory=AnswerLogprobs)
    finish: FinishReason | None = None


class ChatBody:
    """Collects the pieces of generated text into the one object of a chat completion that is not
    streamed; with ``ids``, with the token ids of prompt and choices."""

    def __init__(
        self, head: Head, *, n: int, logprobs: bool, scored: bool, ids: bool = False
    ) -> None:
        self._head = head
        self._ids = ids
        self._logprobs = logprobs
        self._choices = [_Choice() for _ in range(n)]
        self._scores: list[TokenLogprob] | None = [] if scored else None

    def add(self, prompt: int, delta: Delta) -> None:
        choice = self._choices[delta.choice]
        choice.text.append(delta.text)
        choice.reasoning.append(delta.reasoning)
        choice.ids += delta.ids
        for piece in delta.tool_calls:
            if piece.index not in choice.calls:
                choice.calls[piece.index] = {
                    "id": piece.id or "",
                    "type": "function",
                    "function": {"name": piece.name or "", "arguments": ""},
                }
            choice.calls[piece.index]["function"]["arguments"] += piece.arguments
        if self._logprobs:
            choice.logprobs += choice.answer_logprobs.of_text(delta)
        choice.finish = delta.finish or choice.finish
        if self._scores is not None and delta.choice == 0:
            self._scores += delta.prompt_logprobs

    def content(self, usage: Usage) -> ChatCompletion:
        found: ChatCompletion = {
            "id": self._head.id,
            "object": "chat.completion",
            "created": self._head.created,
            "model": self._head.model,
            "system_fingerprint": self._head.fingerprint,
            "choices": [
                {
                    "index": index,
                    "message": _message(choice),
                    "logprobs": {"content": choice.logprobs} if self._logprobs else None,
                    "finish_reason": cast(FinishReason, choice.finish),  # set at the end
                }
                for index, choice in enumerate(self._choices)
            ],
            "usage": completion_usage(usage),
        }
        if self._scores is not None:
            found["prompt_logprobs"] = prompt_logprobs(self._scores)
        if self._ids:
            found["prompt_token_ids"] = list(self._head.prompt_ids[0])
            for content, choice in zip(found["choices"], self._choices, strict=True):
                content["token_ids"] = choice.ids
        return found


def _message(choice: _Choice) -> ChatCompletionMessage:
    text, reasoning = "".join(choice.text), "".join(choice.reasoning)
    message: ChatCompletionMessage = {"role": "assistant", "content": text, "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if choice.calls:
        message["content"] = text or None
        message["tool_calls"] = [call for _, call in sorted(choice.calls.items())]
    return message
