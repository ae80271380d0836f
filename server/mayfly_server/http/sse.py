"""Server-sent events, as OpenAI's clients read them."""

from __future__ import annotations

import json
from collections.abc import Mapping

from mayfly_server.errors import RequestError

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache, no-transform",  # a proxy that compresses would hold events back
    "x-accel-buffering": "no",  # nginx would hold events back
}
DONE = "data: [DONE]\n\n"

encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
"""Encodes JSON as one line of ASCII, which no proxy misreads."""


def event(content: Mapping[str, object]) -> str:
    """An event with a JSON object as its data."""
    return f"data: {encode(content)}\n\n"


class OpenAIEnds:
    """The begin of OpenAI's streams of completions, and their end after an error."""

    def begin(self) -> str:
        return ""

    def failure(self, error: RequestError) -> str:
        return event(error.envelope())


def comment(text: str) -> str:
    """A comment, which clients skip; it keeps the connection open."""
    return f": {text}\n\n"
