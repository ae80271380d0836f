"""Server-sent events, as OpenAI's clients read them."""

from __future__ import annotations

import json
from collections.abc import Mapping

from mayfly_server.errors import RequestError

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache, no-transform",  # a proxy that compresses would collect them
    "x-accel-buffering": "no",  # or nginx would collect them
}
DONE = "data: [DONE]\n\n"

encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
"""One line of ASCII, whatever characters are in it: no proxy can take it for anything else."""


def event(content: Mapping[str, object]) -> str:
    return f"data: {encode(content)}\n\n"


class OpenAIEnds:
    """How streams of chat completions and completions begin, and how they end where they fail."""

    def begin(self) -> str:
        return ""

    def failure(self, error: RequestError) -> str:
        return event(error.envelope())


def comment(text: str) -> str:
    """Keeps the connection alive; clients skip it."""
    return f": {text}\n\n"
