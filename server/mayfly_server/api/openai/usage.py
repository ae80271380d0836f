"""Token counts (the field ``usage``) in answers of OpenAI's chat completions and completions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mayfly_protocol.serving import Delta, Usage
from mayfly_server.api.openapi import AnswerObject
from mayfly_server.http import sse

UsageReport = Literal["never", "in the last chunk", "in every chunk"]
"""The chunks of a stream that report token counts: none, the last one, or all."""


class PromptTokensDetails(AnswerObject):
    cached_tokens: int


class CompletionTokensDetails(AnswerObject):
    reasoning_tokens: int


class UsageSoFar(AnswerObject):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionUsage(UsageSoFar):
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


ChunkUsage = Annotated[
    CompletionUsage | UsageSoFar | None,
    Field(
        description="Only with include_usage: the token counts of the whole request in a last "
        "chunk without choices. Earlier chunks have null or, with continuous_usage_stats, the "
        "counts so far."
    ),
]


def completion_usage(usage: Usage) -> CompletionUsage:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


class StreamUsage:
    """Counts a stream's tokens and writes the ``usage`` field of the stream's chunks.

    ``closing`` is the JSON text that follows the choices in the next chunk. The numbers of cached
    and of reasoning tokens are known only at the stream's end, so only the last chunk has them.
    """

    def __init__(self, report: UsageReport, prompt_tokens: int) -> None:
        self.in_last_chunk = report != "never"
        self._in_every_chunk = report == "in every chunk"
        self._prompt_tokens = prompt_tokens
        self._completion_tokens = 0
        self.closing = ('],"usage":null}' if self.in_last_chunk else "]}") + "\n\n"

    def count(self, delta: Delta) -> None:
        if not self._in_every_chunk:
            return
        self._completion_tokens += len(delta.ids)
        so_far: UsageSoFar = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
        }
        self.closing = f'],"usage":{sse.encode(so_far)}}}\n\n'
