"""Measures generation without a server: mlx-lm's BatchGenerator in a loop, which gets all requests
at the start, or Mayfly's engine.

``python bench/inprocess.py MODEL [loop | engine]`` reads rounds as JSON lines on stdin (bodies of
chat completions and a concurrency), and answers each line with the round's figures, so that these
rounds can be interleaved with those of servers.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import mlx.core as mx
from decoding import Decoder
from mlx_lm import load
from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import make_sampler

from mayfly_protocol.requests import Sampling
from mayfly_worker.engine.chunks import ChunkSizer
from mayfly_worker.engine.sampler import SequenceSampling
from mayfly_worker.engine.sequence import Event, SequenceState, Start, StepResult

MAX_ROWS = 64
Run = Callable[[Any, list[dict[str, Any]], int], dict[str, Any]]
"""A function that runs one round and returns its figures; its arguments are a tokenizer, bodies of
chat completions, and the number of requests that decode together."""


def run_loop(
    model: Any, tokenizer: Any, bodies: list[dict[str, Any]], concurrency: int
) -> dict[str, Any]:
    temperature = float(bodies[0].get("temperature", 0))
    sampler = make_sampler(temperature, bodies[0].get("top_p", 1.0)) if temperature else None
    begin = time.perf_counter()
    waiting = [
        tokenizer.apply_chat_template(b["messages"], add_generation_prompt=True) for b in bodies
    ]
    generator = BatchGenerator(
        model,
        completion_batch_size=concurrency,
        prefill_batch_size=min(8, concurrency),  # the larger of the two sizes is the decode batch's
        sampler=sampler,
    )
    uids = generator.insert(waiting, [int(b["max_tokens"]) for b in bodies])
    arrivals: dict[int, list[float]] = {uid: [] for uid in uids}
    left = set(uids)
    while left:
        _, responses = generator.next()
        now = time.perf_counter()
        for response in responses:
            arrivals[response.uid].append(now)
            if response.finish_reason:
                left.discard(response.uid)
    answer = figures(begin, arrivals.values())
    generator.close()
    return answer


def figures(begin: float, arrivals: Iterable[list[float]]) -> dict[str, Any]:
    return {
        "seconds": time.perf_counter() - begin,
        "timings": [
            {
                "ttft": times[0] - begin,
                "gaps": [b - a for a, b in itertools.pairwise(times)],
                "tokens": len(times),
            }
            for times in arrivals
        ],
    }


class EngineRun:
    """Runs rounds of requests in one engine of Mayfly's; when a request has ended, the next one
    starts."""

    def __init__(self, model: Any) -> None:
        decoder = Decoder.with_model(model)
        self._engine = decoder.engine(
            MAX_ROWS,
            decoder.price,
            ChunkSizer(1.0, 0.25),
            self._hear,
            bucketed=mx.cuda.is_available(),
        )
        self._arrivals: dict[int, list[float]] = {}
        self._left: set[int] = set()
        self._ids = itertools.count()

    def _hear(self, events: list[Event]) -> None:
        now = time.perf_counter()
        for drawn in (d for event in events if isinstance(event, StepResult) for d in event.tokens):
            self._arrivals[drawn.row].append(now)
            if drawn.end is not None:
                self._left.discard(drawn.row)

    def __call__(
        self, tokenizer: Any, bodies: list[dict[str, Any]], concurrency: int
    ) -> dict[str, Any]:
        begin = time.perf_counter()
        ids = list(itertools.islice(self._ids, len(bodies)))
        self._arrivals = {row: [] for row in ids}
        self._left = set(ids)
        waiting = deque(zip(ids, bodies, strict=True))
        while self._left:
            while waiting and len(self._left) - len(waiting) < concurrency:
                self._start(tokenizer, *waiting.popleft())
            self._engine.turn()
        return figures(begin, self._arrivals.values())

    def _start(self, tokenizer: Any, number: int, body: dict[str, Any]) -> None:
        tokens = tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True)
        sampling = Sampling(number, body.get("temperature", 0.0), body.get("top_p", 1.0))
        ends, most = frozenset(tokenizer.eos_token_ids), int(body["max_tokens"])
        row = SequenceState(number, tokens, SequenceSampling(sampling), most, stop_ids=ends)
        self._engine.commands.put(Start(str(number), [row]))


def main() -> None:
    model, tokenizer = load(sys.argv[1])
    run: Run = EngineRun(model) if sys.argv[2:] == ["engine"] else partial(run_loop, model)
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(run(tokenizer, order["bodies"], order["concurrency"])), flush=True)


if __name__ == "__main__":
    main()
