"""Times decode steps by sampling method (greedy, top_p, penalties, logprobs ...): Mayfly's engine
itself, without a server, beside mlx-lm's BatchGenerator with its own samplers.

    python bench/steps.py MODEL_FOLDER

The overhead of a server per step is the time between two tokens that ``speed.py`` finds, less the
time of a step that this program finds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from decoding import GREEDY, Decoder, median_ms, spread
from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import make_sampler

from mayfly_protocol.requests import Dry, Sampling
from mayfly_worker.engine.history import SequenceBreakers
from mayfly_worker.engine.sampler import SequenceSampling

PROMPT = 140
BARE, BARE_SAMPLED = "mlx-lm, greedy", "mlx-lm, temperature and top_p"


def sampled(**more: Any) -> SequenceSampling:
    return SequenceSampling(Sampling(seed=1, temperature=0.7, **more))


OURS: dict[str, dict[str, Any]] = {
    "greedy": {"sampling": GREEDY},
    "temperature": {"sampling": sampled()},
    "temperature and top_p": {"sampling": sampled(top_p=0.9)},
    "temperature, top_p, top_k, min_p": {"sampling": sampled(top_p=0.9, top_k=40, min_p=0.05)},
    "greedy, penalties": {
        "sampling": SequenceSampling(Sampling(seed=1, temperature=0.0, presence_penalty=0.5))
    },
    "temperature, typical_p, XTC": {
        "sampling": sampled(typical_p=0.9, xtc_probability=0.5, xtc_threshold=0.1)
    },
    "temperature, DRY": {
        "sampling": SequenceSampling(
            Sampling(seed=1, temperature=0.7, dry=Dry(0.8)), breakers=SequenceBreakers.of({}, 1)
        )
    },
    "greedy, 5 logprobs": {"sampling": GREEDY, "logprobs": 5},
}


def bare_step_ms(decoder: Decoder, sampler: Any, rows: int, steps: int) -> float:
    """The median milliseconds of a decode step of mlx-lm's BatchGenerator, with one sampler for
    each sequence as in mlx_lm.server."""
    generator = BatchGenerator(
        decoder.model, completion_batch_size=rows, prefill_batch_size=rows, sampler=None
    )
    prompts = decoder.prompts([PROMPT] * rows)
    generator.insert(prompts, [1 << 20] * rows, samplers=[sampler] * rows)
    seen: set[int] = set()
    while len(seen) < rows:
        seen |= {response.uid for response in generator.next()[1]}
    took = median_ms(generator.next, steps)
    generator.close()
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a model folder")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    decoder = Decoder.of(args.model)
    print("| rows | asked for | step ms: median (range) over rounds | / mlx-lm, greedy |")
    print("|---|---|---|---|")
    for rows in args.rows:
        cases: dict[str, Callable[[], float]] = {
            BARE: partial(bare_step_ms, decoder, None, rows, args.steps),
            BARE_SAMPLED: partial(bare_step_ms, decoder, make_sampler(0.7, 0.9), rows, args.steps),
        }
        for name, asked in OURS.items():
            cases[name] = partial(decoder.step_ms, [PROMPT] * rows, args.steps, **asked)
        took: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(args.rounds):
            for name, case in cases.items():
                took[name].append(case())
        for name, values in took.items():
            ratio = statistics.median(a / b for a, b in zip(values, took[BARE], strict=True))
            print(f"| {rows} | {name} | {spread(values)} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
