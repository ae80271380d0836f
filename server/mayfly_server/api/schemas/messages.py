"""Answers of Anthropic's messages."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from mayfly_server.api.schemas.base import Answer
from mayfly_server.api.schemas.errors import AnthropicErrorAnswer


class TextAnswer(Answer):
    type: Literal["text"]
    text: str


class ThinkingAnswer(Answer):
    type: Literal["thinking"]
    thinking: str
    signature: Annotated[str, Field(description="Empty: nothing is signed.")]


class ToolUseAnswer(Answer):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageOutputTokensDetails(Answer):
    thinking_tokens: int


class MessageUsage(Answer):
    input_tokens: Annotated[int, Field(description="Those that were not found in a cache.")]
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int
    output_tokens_details: MessageOutputTokensDetails


Block = Annotated[TextAnswer | ThinkingAnswer | ToolUseAnswer, Field(discriminator="type")]
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageAnswer(Answer):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(Answer):
    input_tokens: int


class MessageStart(Answer):
    type: Literal["message_start"]
    message: MessageAnswer


class ContentBlockStart(Answer):
    type: Literal["content_block_start"]
    index: int
    content_block: Block


class TextGained(Answer):
    type: Literal["text_delta"]
    text: str


class ThinkingGained(Answer):
    type: Literal["thinking_delta"]
    thinking: str


class InputGained(Answer):
    type: Literal["input_json_delta"]
    partial_json: str


class ContentBlockDelta(Answer):
    type: Literal["content_block_delta"]
    index: int
    delta: Annotated[TextGained | ThinkingGained | InputGained, Field(discriminator="type")]


class ContentBlockStop(Answer):
    type: Literal["content_block_stop"]
    index: int


class Stopped(Answer):
    stop_reason: StopReason | None
    stop_sequence: str | None


class MessageDelta(Answer):
    type: Literal["message_delta"]
    delta: Stopped
    usage: MessageUsage


class MessageStop(Answer):
    type: Literal["message_stop"]


MessageEvent = Annotated[
    MessageStart
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageDelta
    | MessageStop
    | AnthropicErrorAnswer,
    Field(discriminator="type"),
]

EVENTS = """\
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
