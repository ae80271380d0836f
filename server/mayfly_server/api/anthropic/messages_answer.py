"""The answers of Anthropic's ``POST /v1/messages``: one object, or a stream of these events::

    message_start
      content_block_start, content_block_delta ..., content_block_stop
      ...                             for each block: thinking, text, or tool_use
    message_delta (stop_reason, usage)
    message_stop

One block is open at a time; a delta that belongs to another block closes the open one. A tool_use
that the answer leaves unfinished is not closed, since clients run the tool of a closed one. A
``ping`` stands for silence. An error after the stream's start becomes an ``error`` event, which
ends the stream.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, cast

from pydantic import Field

from mayfly_protocol.requests import FinishReason
from mayfly_protocol.serving import Delta, ToolCallDelta, Usage
from mayfly_server.api.answer import Head
from mayfly_server.api.openapi import AnswerObject
from mayfly_server.errors import RequestError
from mayfly_server.http import sse
from mayfly_server.http.errors import AnthropicErrorAnswer, anthropic_error


class TextAnswer(AnswerObject):
    type: Literal["text"]
    text: str


class ThinkingAnswer(AnswerObject):
    type: Literal["thinking"]
    thinking: str
    signature: Annotated[str, Field(description="Always empty: this server signs no thoughts.")]


class ToolUseAnswer(AnswerObject):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = Annotated[TextAnswer | ThinkingAnswer | ToolUseAnswer, Field(discriminator="type")]


class MessageOutputTokensDetails(AnswerObject):
    thinking_tokens: int


class MessageUsage(AnswerObject):
    input_tokens: Annotated[int, Field(description="Prompt tokens that were not found in a cache.")]
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int
    output_tokens_details: MessageOutputTokensDetails


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageAnswer(AnswerObject):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageStart(AnswerObject):
    type: Literal["message_start"]
    message: MessageAnswer


class ContentBlockStart(AnswerObject):
    type: Literal["content_block_start"]
    index: int
    content_block: AnswerBlock


class TextBlockDelta(AnswerObject):
    type: Literal["text_delta"]
    text: str


class ThinkingBlockDelta(AnswerObject):
    type: Literal["thinking_delta"]
    thinking: str


class InputJsonDelta(AnswerObject):
    type: Literal["input_json_delta"]
    partial_json: str


BlockDelta = Annotated[
    TextBlockDelta | ThinkingBlockDelta | InputJsonDelta, Field(discriminator="type")
]


class ContentBlockDelta(AnswerObject):
    type: Literal["content_block_delta"]
    index: int
    delta: BlockDelta


class ContentBlockStop(AnswerObject):
    type: Literal["content_block_stop"]
    index: int


class StopDelta(AnswerObject):
    stop_reason: StopReason | None
    stop_sequence: str | None


class MessageDelta(AnswerObject):
    type: Literal["message_delta"]
    delta: StopDelta
    usage: MessageUsage


class MessageStop(AnswerObject):
    type: Literal["message_stop"]


class Ping(AnswerObject):
    type: Literal["ping"]


MessageEvent = Annotated[
    MessageStart
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageDelta
    | MessageStop
    | Ping
    | AnthropicErrorAnswer,
    Field(discriminator="type"),
]

MESSAGE_EVENTS = """\
event: message_start
data: {"type":"message_start","message":{"id":"msg_1","type":"message","role":"assistant",\
"model":"m","content":[],"stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":9,\
"cache_read_input_tokens":0,"cache_creation_input_tokens":0,"output_tokens":0,\
"output_tokens_details":{"thinking_tokens":0}}}}

event: content_block_start
data: {"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}

event: content_block_delta
data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"Paris."}}

event: content_block_stop
data: {"type":"content_block_stop","index":0}

event: message_delta
data: {"type":"message_delta","delta":{"stop_reason":"end_turn","stop_sequence":null},\
"usage":{"input_tokens":9,"cache_read_input_tokens":0,"cache_creation_input_tokens":0,\
"output_tokens":3,"output_tokens_details":{"thinking_tokens":0}}}

event: message_stop
data: {"type":"message_stop"}

"""

_STOP_REASONS: dict[FinishReason, StopReason] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}


def _encode(event: MessageEvent) -> str:
    return f"event: {event['type']}\n{sse.event(event)}"


class _Stop(NamedTuple):
    reason: StopReason | None = None
    sequence: str | None = None


def _stop(finish: FinishReason, sequence: str | None) -> _Stop:
    if finish == "stop" and sequence is not None:
        return _Stop("stop_sequence", sequence)
    return _Stop(_STOP_REASONS[finish])


def message_usage(usage: Usage) -> MessageUsage:
    """Token counts in Anthropic's form, whose ``input_tokens`` leave out the prompt tokens found in
    the prefix cache."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


def _message(head: Head, content: list[AnswerBlock], stop: _Stop, usage: Usage) -> MessageAnswer:
    return {
        "id": head.id,
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": content,
        "stop_reason": stop.reason,
        "stop_sequence": stop.sequence,
        "usage": message_usage(usage),
    }


class MessageEvents:
    """Writes the events of a stream of ``POST /v1/messages``. ``thoughts`` says whether the client
    sees the text of the model's reasoning; ``request_id`` appears in the event of an error."""

    def __init__(self, head: Head, *, thoughts: bool, request_id: str) -> None:
        self._head = head
        self._thoughts = thoughts
        self._request_id = request_id
        self._index = -1
        self._open: str | None = None
        self._stop = _Stop()

    def begin(self) -> str:
        usage = Usage(prompt_tokens=self._head.prompt_tokens)
        message = _message(self._head, [], _Stop(), usage)
        return _encode({"type": "message_start", "message": message})

    def chunk(self, prompt: int, delta: Delta) -> str:
        events = ""
        if delta.reasoning:
            if self._open != "thinking":
                events += self._start({"type": "thinking", "thinking": "", "signature": ""})
            if self._thoughts:
                events += self._delta({"type": "thinking_delta", "thinking": delta.reasoning})
        if delta.text:
            if self._open != "text":
                events += self._start({"type": "text", "text": ""})
            events += self._delta({"type": "text_delta", "text": delta.text})
        for call in delta.tool_calls:
            if call.name is not None:
                events += self._start(_tool_use(call))
            if call.arguments:
                events += self._delta({"type": "input_json_delta", "partial_json": call.arguments})
            if call.unfinished:
                self._open = None
        if delta.finish is not None:
            self._stop = _stop(delta.finish, delta.stop)
        return events

    def end(self, usage: Usage) -> str:
        changed: MessageDelta = {
            "type": "message_delta",
            "delta": {"stop_reason": self._stop.reason, "stop_sequence": self._stop.sequence},
            "usage": message_usage(usage),
        }
        return self._close() + _encode(changed) + _encode({"type": "message_stop"})

    def alive(self, note: str) -> str:
        return _encode({"type": "ping"})

    def failure(self, error: RequestError) -> str:
        return _encode(anthropic_error(error, self._request_id))

    def _start(self, block: AnswerBlock) -> str:
        """Events that close the open content block, if any, and open the next one, ``block``."""
        closed = self._close()
        self._open = block["type"]
        self._index += 1
        started: ContentBlockStart = {
            "type": "content_block_start",
            "index": self._index,
            "content_block": block,
        }
        return closed + _encode(started)

    def _delta(self, delta: BlockDelta) -> str:
        return _encode({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _close(self) -> str:
        if self._open is None:
            return ""
        self._open = None
        return _encode({"type": "content_block_stop", "index": self._index})


def _tool_use(call: ToolCallDelta, arguments: str = "{}") -> ToolUseAnswer:
    return {
        "type": "tool_use",
        "id": cast(str, call.id),
        "name": cast(str, call.name),
        "input": json.loads(arguments),
    }


@dataclass(slots=True)
class _Block:
    """A content block of an answer that is not streamed. ``call`` is the first piece of the tool
    call, for a block of kind tool_use."""

    kind: Literal["thinking", "text", "tool_use"]
    call: ToolCallDelta | None = None
    pieces: list[str] = field(default_factory=list)

    def content(self) -> AnswerBlock:
        text = "".join(self.pieces)
        if self.call is not None:
            return _tool_use(self.call, text or "{}")
        if self.kind == "thinking":
            return {"type": "thinking", "thinking": text, "signature": ""}
        return {"type": "text", "text": text}


class MessageBody:
    """Collects the pieces of generated text into the one message of an answer that is not streamed,
    in the same content blocks as in a stream."""

    def __init__(self, head: Head, *, thoughts: bool) -> None:
        self._head = head
        self._thoughts = thoughts
        self._blocks: list[_Block] = []
        self._stop = _Stop()

    def add(self, prompt: int, delta: Delta) -> None:
        if delta.reasoning:
            self._add("thinking", delta.reasoning if self._thoughts else "")
        if delta.text:
            self._add("text", delta.text)
        for call in delta.tool_calls:
            if call.name is not None:
                self._blocks.append(_Block("tool_use", call))
            self._blocks[-1].pieces.append(call.arguments)
        if delta.finish is not None:
            self._stop = _stop(delta.finish, delta.stop)

    def content(self, usage: Usage) -> MessageAnswer:
        blocks = [block.content() for block in self._blocks]
        return _message(self._head, blocks, self._stop, usage)

    def _add(self, kind: Literal["thinking", "text"], text: str) -> None:
        if not self._blocks or self._blocks[-1].kind != kind:
            self._blocks.append(_Block(kind))
        self._blocks[-1].pieces.append(text)
