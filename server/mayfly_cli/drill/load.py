"""Clients that stream completions one after the other, and note what came when.

Text completions that ignore the end token: any model answers them, and all are equally long.
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

PATIENCE_S = 600.0
"""A stream that is silent for so long counts as lost."""


@dataclass
class Stream:
    """One request. ``at`` holds the times at which a chunk with text came, by the monotonic clock;
    ``error`` says why it did not end well."""

    ask: int
    began: float
    at: list[float] = field(default_factory=list)
    text: str = ""
    tokens: int = 0
    finish: str | None = None
    error: str | None = None


class Load:
    """``asks`` are bodies for ``POST /v1/completions``, which clients take in turn."""

    def __init__(self, connect: Callable[[], httpx.Client], asks: Sequence[dict[str, Any]]) -> None:
        self._connect = connect
        self._asks = asks
        self._numbers = itertools.count()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self.streams: list[Stream] = []

    def once(self) -> list[Stream]:
        """Every ask once, one after the other."""
        with self._connect() as client:
            return [_stream(client, number, ask) for number, ask in enumerate(self._asks)]

    def start(self, clients: int, total: int | None = None) -> None:
        """So many clients ask until :meth:`stop`, or until they have asked ``total`` times."""
        for number in range(clients):
            thread = threading.Thread(
                target=self._run, args=(total,), name=f"client {number}", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    @property
    def going(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def stop(self) -> list[Stream]:
        """Lets every client finish what it has; returns all that was asked since the start."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        return self.streams

    def _run(self, total: int | None) -> None:
        with self._connect() as client:
            while not self._stop.is_set():
                asked = next(self._numbers)
                if total is not None and asked >= total:
                    return
                number = asked % len(self._asks)
                self.streams.append(_stream(client, number, self._asks[number]))


def _stream(client: httpx.Client, number: int, ask: dict[str, Any]) -> Stream:
    stream = Stream(number, time.monotonic())
    body = {**ask, "stream": True, "stream_options": {"include_usage": True}}
    timeout = httpx.Timeout(PATIENCE_S, connect=10.0)
    try:
        with client.stream("POST", "/v1/completions", json=body, timeout=timeout) as response:
            if response.status_code != 200:
                response.read()
                stream.error = f"HTTP {response.status_code}: {_message(response.text)}"
                return stream
            for line in response.iter_lines():
                _take(stream, line)
    except httpx.HTTPError as error:
        stream.error = f"the connection was lost: {error or type(error).__name__}"
    if stream.error is None and stream.finish is None:
        stream.error = "the stream has no end"
    if stream.error is None and stream.tokens != ask["max_tokens"]:
        stream.error = f"{stream.tokens} tokens instead of {ask['max_tokens']}"
    return stream


def _take(stream: Stream, line: str) -> None:
    if not line.startswith("data: {"):
        return
    event = json.loads(line.removeprefix("data: "))
    if "error" in event:
        stream.error = str(event["error"].get("message"))
    for choice in event.get("choices", ()):
        if choice["text"]:
            stream.at.append(time.monotonic())
            stream.text += choice["text"]
        stream.finish = choice["finish_reason"] or stream.finish
    if event.get("usage"):
        stream.tokens = event["usage"]["completion_tokens"]


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:200]
