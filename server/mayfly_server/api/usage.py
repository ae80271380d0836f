"""Usage as OpenAI's clients read it."""

from __future__ import annotations

from typing import Any, Literal

from mayfly_protocol.serving import Delta, Usage
from mayfly_server.http import sse

Told = Literal["never", "at the end", "all along"]
"""When a stream says what was used."""


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


class ChunkEnds:
    """How a stream's chunks end: ``closing`` is what comes after the choices of the next one.

    All along, it counts the tokens of all choices until then. What a cache had and what was thought
    is known at the end alone.
    """

    def __init__(self, told: Told, prompt_tokens: int) -> None:
        self.at_the_end = told != "never"
        self._all_along = told == "all along"
        self._prompt_tokens = prompt_tokens
        self._completion_tokens = 0
        self.closing = ('],"usage":null}' if self.at_the_end else "]}") + "\n\n"

    def count(self, delta: Delta) -> None:
        if not self._all_along:
            return
        self._completion_tokens += len(delta.ids)
        so_far = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
        }
        self.closing = f'],"usage":{sse.encode(so_far)}}}\n\n'
