"""Measures how much the speeds of identical processes differ: several processes of mlx-lm's
generator, several of Mayfly's engine, and one of each server beside them. One request runs at a
time; the order of the processes is random.

    python bench/twins.py MODEL_FOLDER

A difference between two programs means little if identical processes differ as much.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import statistics
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from client import Round, chat, prompts
from decoding import spread
from servers import Mayfly, peer
from speed import InProcess

BASE = "loop 1"
SERVERS = ("mayfly", "mlx_lm.server")


def start(name: str, model: Path, folder: Path) -> Any:
    match name:
        case "mayfly":
            return Mayfly(model, folder)
        case "mlx_lm.server":
            return peer(name, Path(sys.prefix), model, folder)
        case _:
            return InProcess(model, name.split()[0])


def step_ms(turn: Round) -> float:
    """The mean milliseconds from one token to the next in a round."""
    gaps = [gap for timing in turn.timings for gap in timing.gaps]
    return statistics.fmean(gaps) * 1e3 if gaps else float("nan")


Speeds = dict[str, list[float]]
"""Tokens per second in each round, by the process's name."""


def ratios(speeds: Speeds, pairs: Iterable[tuple[str, str]]) -> list[float]:
    """The ratios of the first process's speed to the second's, for each pair and round."""
    return [a / b for one, other in pairs for a, b in zip(speeds[one], speeds[other], strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a model folder")
    parser.add_argument("--each", type=int, default=3, help="processes of a kind")
    parser.add_argument("--servers", nargs="*", default=list(SERVERS), choices=SERVERS)
    parser.add_argument("--rounds", type=int, default=18)
    parser.add_argument(
        "--requests", type=int, default=1, help="requests to each process in a round, in sequence"
    )
    parser.add_argument("--prompt-words", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=128)
    args = parser.parse_args()
    twins = {k: [f"{k} {i + 1}" for i in range(args.each)] for k in ("loop", "engine")}
    names = [*itertools.chain.from_iterable(twins.values()), *args.servers]
    steps: dict[str, list[float]] = {name: [] for name in names}
    speeds: Speeds = {name: [] for name in names}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        who = {
            name: stack.enter_context(contextlib.closing(start(name, args.model, folder)))
            for name in names
        }
        for number in range(-1, args.rounds):  # round -1 warms up and is not counted
            for name in random.Random(number).sample(names, len(names)):
                texts = prompts(args.requests, args.prompt_words, seed=number + 10)
                work = [chat(who[name].model, text, args.max_tokens) for text in texts]
                turn = who[name].round(work, 1)
                if number >= 0:
                    steps[name].append(step_ms(turn))
                    speeds[name].append(turn.tokens_per_second)
    print(f"| who | step ms: median (range) | tok/s | / {BASE}, tok/s |\n|---|---|---|---|")
    for name in names:
        ratio = spread(ratios(speeds, [(name, BASE)])) if name != BASE else "-"
        median = statistics.median(speeds[name])
        print(f"| {name} | {spread(steps[name])} | {median:.0f} | {ratio} |")
    print("\n| in the same round | tok/s: median (range) |\n|---|---|")
    for kind, same in twins.items():
        if pairs := list(itertools.permutations(same, 2)):
            print(f"| {kind} / another {kind} | {spread(ratios(speeds, pairs))} |")
    across = itertools.product(twins["engine"], twins["loop"])
    print(f"| engine / loop | {spread(ratios(speeds, across))} |")


if __name__ == "__main__":
    main()
