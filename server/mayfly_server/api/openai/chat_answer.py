"""Answers of ``POST /v1/chat/completions``: chunks of a stream, and the whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mayfly_protocol.serving import Delta, TokenLogprob, ToolCallDelta, Usage
from mayfly_server.api.answer import Head
from mayfly_server.api.logprobs import chat_logprobs
from mayfly_server.api.usage import ChunkEnds, Told, usage_object
from mayfly_server.http import sse


class ChatChunks(sse.OpenAIEnds):
    """A choice's first chunk carries its role, its last one the finish reason and nothing else.

    Made by hand where a model would be clean: this is what every token of every stream passes.
    """

    def __init__(self, head: Head, *, logprobs: bool, usage: Told) -> None:
        content = {
            "id": head.id,
            "object": "chat.completion.chunk",
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.fingerprint,
        }
        self._opening = f'data: {sse.encode(content)[:-1]},"choices":['
        self._logprobs = logprobs
        self._usage = ChunkEnds(usage, head.prompt_tokens)
        self._content = content
        self._begun: set[int] = set()

    def chunk(self, prompt: int, delta: Delta) -> str:
        self._usage.count(delta)
        chunks = ""
        if delta.choice not in self._begun:
            self._begun.add(delta.choice)
            chunks = self._chunk(delta.choice, {"role": "assistant", "content": ""})
        gained = _gained(delta)
        if self._logprobs and delta.logprobs:
            gained.setdefault("content", "")
            chunks += self._chunk(delta.choice, gained, logprobs=delta.logprobs)
        elif gained:
            chunks += self._chunk(delta.choice, gained)
        if delta.finish is not None:
            chunks += self._chunk(delta.choice, {}, finish=delta.finish)
        return chunks

    def end(self, usage: Usage) -> str:
        if not self._usage.at_the_end:
            return sse.DONE
        last = self._content | {"choices": [], "usage": usage_object(usage)}
        return sse.event(last) + sse.DONE

    def _chunk(
        self,
        choice: int,
        delta: dict[str, Any],
        *,
        logprobs: tuple[TokenLogprob, ...] = (),
        finish: str | None = None,
    ) -> str:
        content = {
            "index": choice,
            "delta": delta,
            "logprobs": {"content": chat_logprobs(logprobs)} if logprobs else None,
            "finish_reason": finish,
        }
        return f"{self._opening}{sse.encode(content)}{self._usage.closing}"


def _gained(delta: Delta) -> dict[str, Any]:
    gained: dict[str, Any] = {}
    if delta.reasoning:
        gained["reasoning_content"] = delta.reasoning
    if delta.text:
        gained["content"] = delta.text
    if delta.tool_calls:
        gained["tool_calls"] = [_call_piece(call) for call in delta.tool_calls]
    return gained


def _call_piece(call: ToolCallDelta) -> dict[str, Any]:
    function: dict[str, Any] = {"arguments": call.arguments}
    piece: dict[str, Any] = {"index": call.index, "function": function}
    if call.name is not None:
        function["name"] = call.name
        piece |= {"id": call.id, "type": "function"}
    return piece


@dataclass(slots=True)
class _Call:
    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class _Choice:
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, _Call] = field(default_factory=dict)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish: str | None = None


class ChatBody:
    def __init__(self, head: Head, *, n: int, logprobs: bool) -> None:
        self._head = head
        self._logprobs = logprobs
        self._choices = [_Choice() for _ in range(n)]

    def add(self, prompt: int, delta: Delta) -> None:
        choice = self._choices[delta.choice]
        choice.text.append(delta.text)
        choice.reasoning.append(delta.reasoning)
        for piece in delta.tool_calls:
            call = choice.calls.setdefault(piece.index, _Call(piece.id or "", piece.name or ""))
            call.arguments += piece.arguments
        if self._logprobs:
            choice.logprobs += chat_logprobs(delta.logprobs)
        choice.finish = delta.finish or choice.finish

    def content(self, usage: Usage) -> dict[str, Any]:
        return {
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
                    "finish_reason": choice.finish,
                }
                for index, choice in enumerate(self._choices)
            ],
            "usage": usage_object(usage),
        }


def _message(choice: _Choice) -> dict[str, Any]:
    text, reasoning = "".join(choice.text), "".join(choice.reasoning)
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if choice.calls:
        message["content"] = text or None
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for _, call in sorted(choice.calls.items())
        ]
    return message
