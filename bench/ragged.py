"""What one long row costs the short ones beside it.

Decodes seven rows of 50 tokens and one of 3000 (``--long``) in the engine itself, without a server,
once padded to one batch, once with the long row apart and once as it is served, which is one of the
two: the engine counts which should cost less. Prints the median time of a step.

    python bench/ragged.py MODEL_FOLDER
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import Any

from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from mayfly_worker.engine import caches
from mayfly_worker.engine.admission import Budget
from mayfly_worker.engine.chunks import ChunkSizer
from mayfly_worker.engine.lanes import pass_tokens
from mayfly_worker.engine.loop import Engine
from mayfly_worker.engine.sampler import RowSampling
from mayfly_worker.engine.types import Row, Start
from mayfly_worker.prefix_cache import PrefixCache
from mayfly_worker.probing import Probe, probe
from mayfly_worker.references import References

TOGETHER, APART = float("inf"), 0.0
SHORT = 50
WARM_UP = 5


def step_ms(model: Any, found: Probe, lengths: list[int], price: float, steps: int) -> float:
    """The median time of a decode step of rows with so many tokens."""
    engine = Engine(
        model,
        found.width,
        budget=Budget(len(lengths), 1 << 60, found.cost.per_token),
        chunks=ChunkSizer(1.0, 1.0),
        prefixes=PrefixCache(0),
        emit=lambda events: None,
        new_cache=caches.factory(model),
        padding_safe=found.padding_safe,
        pass_tokens=price,
    )
    rng = random.Random(0)
    for i, length in enumerate(lengths):
        tokens = [rng.randrange(found.width) for _ in range(length)]
        engine.commands.put(Start(str(i), [Row(i, tokens, RowSampling.greedy(), 1 << 20)]))
    while engine.gauges.running < len(lengths) or engine.gauges.phase != "decode":
        engine.turn()
    for _ in range(WARM_UP):
        engine.turn()
    took = []
    for _ in range(steps):
        began = time.perf_counter()
        engine.turn()
        took.append((time.perf_counter() - began) * 1e3)
    return statistics.median(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a model folder")
    parser.add_argument("--long", type=int, nargs="+", default=[3000], metavar="TOKENS")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    model = load_model(args.model)[0]
    found = probe(model, caches.factory(model), References.of("", ""))
    parameters: list[tuple[str, Any]] = list(tree_flatten(model.parameters()))  # type: ignore[arg-type]
    price = pass_tokens(sum(p.nbytes for _, p in parameters), found.cost.per_token)
    cases = {f"8 of {SHORT}": ([SHORT] * 8, TOGETHER)}
    for long in args.long:
        mixed, name = [SHORT] * 7 + [long], f"7 of {SHORT} and 1 of {long}"
        cases |= {
            f"1 of {long}": ([long], TOGETHER),
            f"{name}, one batch": (mixed, TOGETHER),
            f"{name}, two batches": (mixed, APART),
            f"{name}, as served": (mixed, price),
        }
    took: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(args.rounds):
        for name, (lengths, its_price) in cases.items():
            took[name].append(step_ms(model, found, lengths, its_price, args.steps))
    print(f"A forward pass counts as {price:.0f} tokens of cache.\n")
    print("| rows | step ms: median (range) over rounds |\n|---|---|")
    for name, values in took.items():
        print(f"| {name} | {statistics.median(values):.1f} ({min(values):.1f}-{max(values):.1f}) |")


if __name__ == "__main__":
    main()
