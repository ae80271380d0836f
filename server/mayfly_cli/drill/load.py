"""The load of a drill: clients that stream completions one after the other, and record when each
chunk came.

The requests are text completions that ignore the end token, so that every model can answer them and
all answers have the same number of tokens.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

SILENCE_S = 600.0
"""Seconds without data after which a stream counts as failed."""


@dataclass
class CompletionStream:
    """The record of one request for a streamed completion.

    Attributes:
        request: the index of the request's body among the bodies that the clients send in turn.
        began: the time at which the request was sent, in seconds on the monotonic clock.
        chunk_times: the time of each chunk with text, on the same clock.
        text: the generated text so far.
        tokens: the number of generated tokens, from the stream's last event; 0 before.
        finish: the finish reason; None before the end.
        error: the reason why the request failed; None if it did not fail.
    """

    request: int
    began: float
    chunk_times: list[float] = field(default_factory=list)
    text: str = ""
    tokens: int = 0
    finish: str | None = None
    error: str | None = None


class DrillLoad:
    """The load of a drill: clients in threads that send requests to a server. They send the
    ``bodies`` to ``POST /v1/completions`` in turn; ``connect`` makes an HTTP client."""

    def __init__(
        self, connect: Callable[[], httpx.Client], bodies: Sequence[dict[str, Any]]
    ) -> None:
        self._connect = connect
        self._bodies = bodies
        self._numbers = itertools.count()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self.streams: list[CompletionStream] = []

    def run_once(self) -> list[CompletionStream]:
        """Sends each of the requests' bodies once, one after the other, and returns the records of
        the answers."""
        with self._connect() as client:
            return [_stream(client, number, body) for number, body in enumerate(self._bodies)]

    def start(self, clients: int, total: int | None = None) -> None:
        """Starts ``clients`` threads that send requests until :meth:`stop`, or until they have sent
        ``total`` requests together."""
        for number in range(clients):
            thread = threading.Thread(
                target=self._run, args=(total,), name=f"client {number}", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    @property
    def running(self) -> bool:
        """True while any client still sends requests."""
        return any(thread.is_alive() for thread in self._threads)

    def stop(self) -> list[CompletionStream]:
        """Stops the clients after their present requests. Returns the records of all requests since
        :meth:`start`."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        return self.streams

    def _run(self, total: int | None) -> None:
        with self._connect() as client:
            while not self._stop.is_set():
                sent = next(self._numbers)
                if total is not None and sent >= total:
                    return
                number = sent % len(self._bodies)
                self.streams.append(_stream(client, number, self._bodies[number]))


def _stream(client: httpx.Client, number: int, body: dict[str, Any]) -> CompletionStream:
    stream = CompletionStream(number, time.monotonic())
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    timeout = httpx.Timeout(SILENCE_S, connect=10.0)
    try:
        with client.stream("POST", "/v1/completions", json=streamed, timeout=timeout) as response:
            if response.status_code != 200:
                response.read()
                stream.error = f"HTTP {response.status_code}: {_error_message(response.text)}"
                return stream
            for line in response.iter_lines():
                _add_line(stream, line)
    except httpx.HTTPError as error:
        stream.error = f"the connection was lost: {error or type(error).__name__}"
    if stream.error is None and stream.finish is None:
        stream.error = "the stream ended without a finish reason"
    if stream.error is None and stream.tokens != body["max_tokens"]:
        stream.error = f"{stream.tokens} tokens instead of {body['max_tokens']}"
    return stream


def _add_line(stream: CompletionStream, line: str) -> None:
    if not line.startswith("data: {"):
        return
    event = json.loads(line.removeprefix("data: "))
    if "error" in event:
        stream.error = str(event["error"].get("message"))
    for choice in event.get("choices", ()):
        if choice["text"]:
            stream.chunk_times.append(time.monotonic())
            stream.text += choice["text"]
        stream.finish = choice["finish_reason"] or stream.finish
    if event.get("usage"):
        stream.tokens = event["usage"]["completion_tokens"]


def _error_message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:200]
