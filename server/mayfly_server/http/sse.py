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
    """The beginning, the comments and the end on errors of a stream in OpenAI's API: the stream
    begins with an empty text, and an error is its last event."""

    def begin(self) -> str:
        return ""

    def alive(self, note: str) -> str:
        return comment(note)

    def failure(self, error: RequestError) -> str:
        return event(error.envelope())


def comment(text: str) -> str:
    """The text of a comment in an event stream. Clients skip it; it keeps the connection open."""
    return f": {text}\n\n"
