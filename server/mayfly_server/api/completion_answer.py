"""Answers of ``POST /v1/completions``: chunks of a stream, and the whole.

Choices are numbered through all prompts: prompt * n + choice.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mayfly_protocol.serving import Delta, Usage
from mayfly_server.api import sse
from mayfly_server.api.logprobs import CompletionLogprobs, empty_lists
from mayfly_server.api.run import Head
from mayfly_server.api.usage import ChunkEnds, Told, usage_object


def _content(head: Head) -> dict[str, Any]:
    return {
        "id": head.id,
        "object": "text_completion",
        "created": head.created,
        "model": head.model,
        "system_fingerprint": head.fingerprint,
    }


class CompletionChunks(sse.OpenAIEnds):
    """A choice's last chunk carries the finish reason."""

    def __init__(self, head: Head, *, n: int, logprobs: bool, usage: Told) -> None:
        self._content = _content(head)
        self._opening = f'data: {sse.encode(self._content)[:-1]},"choices":['
        self._n = n
        self._usage = ChunkEnds(usage, head.prompt_tokens)
        self._logprobs: dict[int, CompletionLogprobs] | None = {} if logprobs else None

    def chunk(self, prompt: int, delta: Delta) -> str:
        self._usage.count(delta)
        index = prompt * self._n + delta.choice
        logprobs = None
        if self._logprobs is not None and delta.logprobs:
            logprobs = self._logprobs.setdefault(index, CompletionLogprobs()).take(delta.logprobs)
        if not delta.text and logprobs is None and delta.finish is None:
            return ""
        content = {
            "index": index,
            "text": delta.text,
            "logprobs": logprobs,
            "finish_reason": delta.finish,
        }
        return f"{self._opening}{sse.encode(content)}{self._usage.closing}"

    def end(self, usage: Usage) -> str:
        if not self._usage.at_the_end:
            return sse.DONE
        last = self._content | {"choices": [], "usage": usage_object(usage)}
        return sse.event(last) + sse.DONE


@dataclass(slots=True)
class _Choice:
    text: list[str] = field(default_factory=list)
    finish: str | None = None
    logprobs: CompletionLogprobs = field(default_factory=CompletionLogprobs)
    lists: dict[str, list[Any]] = field(default_factory=empty_lists)


class CompletionBody:
    def __init__(self, head: Head, *, prompts: int, n: int, logprobs: bool) -> None:
        self._head = head
        self._n = n
        self._logprobs = logprobs
        self._choices = [_Choice() for _ in range(prompts * n)]

    def add(self, prompt: int, delta: Delta) -> None:
        choice = self._choices[prompt * self._n + delta.choice]
        choice.text.append(delta.text)
        choice.finish = delta.finish or choice.finish
        for name, values in choice.logprobs.take(delta.logprobs).items():
            choice.lists[name] += values

    def content(self, usage: Usage) -> dict[str, Any]:
        return _content(self._head) | {
            "choices": [
                {
                    "index": index,
                    "text": "".join(choice.text),
                    "logprobs": choice.lists if self._logprobs else None,
                    "finish_reason": choice.finish,
                }
                for index, choice in enumerate(self._choices)
            ],
            "usage": usage_object(usage),
        }
