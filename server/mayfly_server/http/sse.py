"""Server-sent events in the form that OpenAI's clients read: each event holds one line of JSON."""

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
"""Encodes a value as JSON in one line of ASCII, since a newline would end the event's
data, and proxies could misread other characters."""


def event(content: Mapping[str, object]) -> str:
    """The text of a server-sent event with a JSON object as its data."""
    return f"data: {encode(content)}\n\n"


class OpenAIEnds:
    """The first text of a stream of completions in OpenAI's API, which is empty, and the last text
    of a stream that an error ends."""

    def begin(self) -> str:
        return ""

    def alive(self, note: str) -> str:
        return comment(note)

    def failure(self, error: RequestError) -> str:
        return event(error.envelope())


def comment(text: str) -> str:
    """The text of a comment in an event stream. Clients skip it; it keeps the connection open."""
    return f": {text}\n\n"
