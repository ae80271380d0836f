"""The bare generator: mlx-lm's BatchGenerator in a loop, no HTTP, all requests there at the start.

``python bench/inprocess.py MODEL`` reads rounds as JSON lines on stdin (bodies of chat completions
and a concurrency) and answers each with its figures, so that rounds can be interleaved with those
of servers.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from typing import Any

from mlx_lm import load
from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import make_sampler


def run(
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
        prefill_batch_size=min(8, concurrency),  # the larger of the two is what decodes together
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
    seconds = time.perf_counter() - begin
    generator.close()
    return {
        "seconds": seconds,
        "timings": [
            {
                "ttft": times[0] - begin,
                "gaps": [b - a for a, b in itertools.pairwise(times)],
                "tokens": len(times),
            }
            for times in arrivals.values()
        ],
    }


def main() -> None:
    model, tokenizer = load(sys.argv[1])
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(run(model, tokenizer, order["bodies"], order["concurrency"])), flush=True)


if __name__ == "__main__":
    main()
