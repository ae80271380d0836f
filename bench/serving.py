"""Load on a running server, as its clients feel it: throughput, time to the first token, time
between tokens.

    make bench ARGS="--url http://127.0.0.1:8000 --concurrency 1 8 32"

Each level of concurrency sends its own prompts (different beginnings, so that no prefix cache
answers for the engine) at temperature 0. Times are as the client sees the chunks of a stream come,
so two tokens in one chunk count as one gap.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx

WORDS = ["alpha", "beta", "gamma", "delta", "stone", "river", "cloud", "number"]


@dataclass
class Measured:
    """One request. Times are seconds from its start."""

    tokens: int = 0
    chunks: list[float] = field(default_factory=list)
    error: str | None = None


async def measure(client: httpx.AsyncClient, body: dict[str, object]) -> Measured:
    """Streams one chat completion."""
    result = Measured()
    start = time.perf_counter()
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.is_error:
                result.error = f"HTTP {response.status_code}: {(await response.aread())[:200]!r}"
                return result
            async for line in response.aiter_lines():
                data = line.removeprefix("data: ")
                if data == line or data == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    result.error = str(event["error"])
                elif event["choices"]:
                    result.chunks.append(time.perf_counter() - start)
                if event.get("usage"):
                    result.tokens = event["usage"]["completion_tokens"]
    except httpx.HTTPError as error:
        result.error = repr(error)
    return result


async def load(
    client: httpx.AsyncClient, prompts: Iterator[str], concurrency: int, template: dict[str, object]
) -> list[Measured]:
    """Sends every prompt, so many at a time."""
    results: list[Measured] = []

    async def one_client() -> None:
        for prompt in prompts:
            messages = [{"role": "user", "content": prompt}]
            results.append(await measure(client, {**template, "messages": messages}))

    await asyncio.gather(*(one_client() for _ in range(concurrency)))
    return results


def percentile(values: list[float], share: float) -> float:
    """Nearest rank; NaN of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else float("nan")


def report(concurrency: int, results: list[Measured], seconds: float) -> str:
    """One line."""
    good = [r for r in results if r.error is None and r.chunks]
    first = [r.chunks[0] * 1e3 for r in good]
    gaps = [(b - a) * 1e3 for r in good for a, b in zip(r.chunks, r.chunks[1:], strict=False)]
    rate = sum(r.tokens for r in good) / seconds
    return (
        f"c={concurrency:<3d} ok={len(good)}/{len(results)} tok/s={rate:.1f} "
        f"ttft p50={percentile(first, 0.5):.0f} p99={percentile(first, 0.99):.0f} ms "
        f"itl p50={percentile(gaps, 0.5):.1f} p99={percentile(gaps, 0.99):.1f} ms"
    )


async def run(options: argparse.Namespace) -> int:
    draw = random.Random(options.seed)
    errors: list[str] = []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=options.url, timeout=600.0, limits=limits) as client:
        models = (await client.get("/v1/models")).raise_for_status().json()["data"]
        template = {
            "model": options.model or models[0]["id"],
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "max_tokens": options.tokens,
        }
        for concurrency in options.concurrency:
            prompts = (
                f"{draw.random()} " + " ".join(draw.choices(WORDS, k=options.words))
                for _ in range(concurrency * options.rounds)
            )
            start = time.perf_counter()
            results = await load(client, prompts, concurrency, template)
            print(report(concurrency, results, time.perf_counter() - start), flush=True)
            errors += [r.error for r in results if r.error is not None]
    for error in errors[:5]:
        print(error, file=sys.stderr)
    return 1 if errors else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Put load on a running server.")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="by default the server's first")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=2, help="requests a concurrent client")
    parser.add_argument("--words", type=int, default=100, help="words in a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="most tokens in an answer")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    try:
        return asyncio.run(run(options))
    except httpx.HTTPError as error:
        print(f"no answer from {options.url}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
