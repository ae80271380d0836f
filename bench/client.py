"""A load client: concurrent streamed chat completions, over plain asyncio.

It parses no more HTTP than it needs, so that the client costs little beside what it measures.
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
    """One request: seconds to its first token, between tokens, and how many tokens it got."""

    ttft: float
    gaps: list[float]
    tokens: int


@dataclass
class Round:
    """All requests of one round."""

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
    """The body of a streamed chat completion, greedy unless the options say otherwise, that tells
    at its end what was used."""
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
    """Distinct prompts; with ``prefix_words`` they begin with the same words."""
    shared = " ".join(random.Random(0).choice(WORDS) for _ in range(prefix_words))
    rng = random.Random(seed)
    return [
        f"{shared} {seed}-{i} " + " ".join(rng.choice(WORDS) for _ in range(words))
        for i in range(count)
    ]


class Refused(RuntimeError):
    """Anything but success, before the first event."""


class Cut(RuntimeError):
    """A stream that ended with an error, or without saying that it is complete."""


async def events(
    host: str, port: int, body: dict[str, object]
) -> AsyncGenerator[dict[str, Any], None]:
    """The events of one streamed chat completion.

    Raises:
        OSError: no connection, or it was reset.
        Refused: an answer that is no stream.
        Cut: a stream without its end.
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
    """One streamed chat completion. One whose text a parser has swallowed came at its end.

    Raises what :func:`events` does, and RuntimeError if there was nothing.
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
    """Runs all bodies, so many at a time."""
    queue = list(reversed(bodies))
    timings: list[Timing] = []

    async def client() -> None:
        while queue:
            timings.append(await stream(host, port, queue.pop()))

    begin = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(concurrency)))
    return Round(time.perf_counter() - begin, timings)
