"""A load client: concurrent streamed chat completions, over plain asyncio.

The client parses no more HTTP than it needs, so that it takes little CPU time from the server that
it measures on the same machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

WORDS = ("alpha", "beta", "gamma", "delta", "stone", "river", "cloud", "number")


@dataclass
class Timing:
    """The timing of one request: ``ttft``, seconds to its first token; ``gaps``, seconds between
    successive tokens; ``tokens``, their number."""

    ttft: float
    gaps: list[float]
    tokens: int


@dataclass
class Round:
    """The timings of all requests of one measured round, and the round's length in seconds."""

    seconds: float
    timings: list[Timing] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return sum(t.tokens for t in self.timings) / self.seconds

    def ttft(self, quantile: float) -> float:
        return percentile([t.ttft for t in self.timings], quantile)

    def itl(self, quantile: float) -> float:
        return percentile([g for t in self.timings for g in t.gaps], quantile)


def percentile(values: list[float], quantile: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * quantile))] if ordered else float("nan")


def chat(model: str, text: str, max_tokens: int, **options: object) -> dict[str, object]:
    """The body of a request for a streamed chat completion with token counts in its last chunk;
    greedy unless ``options``, further fields of the body, say otherwise."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **options,
    }


def prompts(count: int, words: int, *, prefix_words: int = 0, seed: int = 7) -> list[str]:
    """Distinct random prompts of ``words`` words each; all begin with the same ``prefix_words``
    words."""
    shared = " ".join(random.Random(0).choice(WORDS) for _ in range(prefix_words))
    rng = random.Random(seed)
    return [
        f"{shared} {seed}-{i} " + " ".join(rng.choice(WORDS) for _ in range(words))
        for i in range(count)
    ]


class Refused(RuntimeError):
    """Raised when a server answers a streamed request with anything but status 200."""


class Cut(RuntimeError):
    """Raised when a stream ends with an error event, or without ``[DONE]``."""


async def events(
    host: str, port: int, body: dict[str, object]
) -> AsyncGenerator[dict[str, Any], None]:
    """The events of one streamed chat completion.

    Raises:
        OSError: the server could not be reached, or reset the connection.
        Refused: the answer's status is not 200.
        Cut: the stream ended with an error event, or without ``[DONE]``.
    """
    payload = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 22)
    try:
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: %s:%d\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
            % (host.encode(), port, len(payload), payload)
        )
        status = await reader.readline()
        if b" 200" not in status:
            raise Refused(f"{status!r} {await reader.read(2000)!r}")
        async for line in reader:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if event.get("error"):
                    raise Cut(str(event["error"]))
                yield event
            elif line.startswith(b"data: [DONE]"):
                return
        raise Cut("the stream has no end")
    finally:
        writer.close()


def has_text(event: dict[str, Any]) -> bool:
    delta = event["choices"][0].get("delta", {}) if event.get("choices") else {}
    return bool(delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning"))


async def stream(host: str, port: int, body: dict[str, object]) -> Timing:
    """Runs one streamed chat completion and times its tokens. An answer without visible text, which
    a server's parser of tool calls or reasoning may have swallowed, counts as one token that came
    at the stream's end.

    Raises what :func:`events` does, and RuntimeError if the answer has neither text nor tokens.
    """
    began = time.perf_counter()
    arrivals: list[float] = []
    tokens = 0
    async with contextlib.aclosing(events(host, port, body)) as told:
        async for event in told:
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
            if has_text(event):
                arrivals.append(time.perf_counter())
    if not arrivals and not tokens:
        raise RuntimeError("no text came back")
    arrivals = arrivals or [time.perf_counter()]
    gaps = [b - a for a, b in itertools.pairwise(arrivals)]
    return Timing(arrivals[0] - began, gaps, tokens or len(arrivals))


async def load(host: str, port: int, bodies: list[dict[str, object]], concurrency: int) -> Round:
    """Sends all request bodies, at most ``concurrency`` at a time, and times the answers."""
    queue = list(reversed(bodies))
    timings: list[Timing] = []

    async def client() -> None:
        while queue:
            timings.append(await stream(host, port, queue.pop()))

    begin = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(concurrency)))
    return Round(time.perf_counter() - begin, timings)
