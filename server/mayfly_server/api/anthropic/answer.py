"""Answers of ``POST /v1/messages``: the events of a stream, and the whole.

::

    message_start
      content_block_start, content_block_delta ..., content_block_stop      a block:
      ...                                            thinking, text, or a tool_use
    message_delta (stop_reason, usage)
    message_stop

One block is open at a time, and what belongs to another one closes it. An error in the middle is an
``error`` event, and the end.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from mayfly_protocol.requests import FinishReason
from mayfly_protocol.serving import Delta, ToolCallDelta, Usage
from mayfly_server.api.answer import Head
from mayfly_server.errors import RequestError
from mayfly_server.http import sse
from mayfly_server.http.errors import anthropic_error

_REASONS: dict[FinishReason, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}


def event(content: dict[str, Any]) -> str:
    return f"event: {content['type']}\n{sse.event(content)}"


def stop_reason(delta: Delta) -> tuple[str | None, str | None]:
    """The stop reason, and the stop sequence that it was."""
    if delta.finish is None:
        return None, None
    if delta.finish == "stop" and delta.stop is not None:
        return "stop_sequence", delta.stop
    return _REASONS[delta.finish], None


def usage_object(usage: Usage) -> dict[str, Any]:
    """Anthropic's input tokens are those that were not found in a cache."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


def _message(head: Head, usage: Usage) -> dict[str, Any]:
    return {
        "id": head.id,
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage_object(usage),
    }


class MessageEvents:
    """``thoughts`` says whether their text is shown; ``request_id`` is for an error."""

    def __init__(self, head: Head, *, thoughts: bool, request_id: str) -> None:
        self._head = head
        self._thoughts = thoughts
        self._request_id = request_id
        self._index = -1
        self._open = ""
        self._stop: tuple[str | None, str | None] = (None, None)

    def begin(self) -> str:
        started = Usage(prompt_tokens=self._head.prompt_tokens)
        return event({"type": "message_start", "message": _message(self._head, started)})

    def chunk(self, prompt: int, delta: Delta) -> str:
        events = ""
        if delta.reasoning:
            events += self._enter("thinking", {"thinking": "", "signature": ""})
            if self._thoughts:
                events += self._delta({"type": "thinking_delta", "thinking": delta.reasoning})
        if delta.text:
            events += self._enter("text", {"text": ""})
            events += self._delta({"type": "text_delta", "text": delta.text})
        for call in delta.tool_calls:
            events += self._call(call)
        if delta.finish is not None:
            self._stop = stop_reason(delta)
        return events

    def end(self, usage: Usage) -> str:
        reason, sequence = self._stop
        changed = {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": sequence},
            "usage": usage_object(usage),
        }
        return self._close() + event(changed) + event({"type": "message_stop"})

    def failure(self, error: RequestError) -> str:
        return event(anthropic_error(error, self._request_id))

    def _call(self, call: ToolCallDelta) -> str:
        opened = ""
        if call.name is not None:
            block: dict[str, Any] = {"id": call.id, "name": call.name, "input": {}}
            opened = self._close() + self._enter("tool_use", block)
        return opened + self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    def _enter(self, kind: str, block: dict[str, Any]) -> str:
        """Has a block of this kind open."""
        if self._open == kind:
            return ""
        closed = self._close()
        self._open = kind
        self._index += 1
        content = {"type": kind, **block}
        return closed + event(
            {"type": "content_block_start", "index": self._index, "content_block": content}
        )

    def _delta(self, delta: dict[str, Any]) -> str:
        return event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _close(self) -> str:
        if not self._open:
            return ""
        self._open = ""
        return event({"type": "content_block_stop", "index": self._index})


@dataclass(slots=True)
class _Block:
    kind: str
    text: list[str] = field(default_factory=list)
    id: str | None = None
    name: str | None = None

    def content(self) -> dict[str, Any]:
        text = "".join(self.text)
        match self.kind:
            case "thinking":
                return {"type": "thinking", "thinking": text, "signature": ""}
            case "text":
                return {"type": "text", "text": text}
            case _:
                arguments = json.loads(text or "{}")
                return {"type": "tool_use", "id": self.id, "name": self.name, "input": arguments}


class MessageBody:
    """The same blocks as in a stream."""

    def __init__(self, head: Head, *, thoughts: bool) -> None:
        self._head = head
        self._thoughts = thoughts
        self._blocks: list[_Block] = []
        self._stop: tuple[str | None, str | None] = (None, None)

    def add(self, prompt: int, delta: Delta) -> None:
        if delta.reasoning:
            self._block("thinking").text.append(delta.reasoning if self._thoughts else "")
        if delta.text:
            self._block("text").text.append(delta.text)
        for call in delta.tool_calls:
            if call.name is not None:
                self._blocks.append(_Block("tool_use", id=call.id, name=call.name))
            self._blocks[-1].text.append(call.arguments)
        if delta.finish is not None:
            self._stop = stop_reason(delta)

    def content(self, usage: Usage) -> dict[str, Any]:
        reason, sequence = self._stop
        return _message(self._head, usage) | {
            "content": [block.content() for block in self._blocks],
            "stop_reason": reason,
            "stop_sequence": sequence,
        }

    def _block(self, kind: str) -> _Block:
        if not self._blocks or self._blocks[-1].kind != kind:
            self._blocks.append(_Block(kind))
        return self._blocks[-1]
