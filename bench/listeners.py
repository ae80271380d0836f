"""Measures how much mlx-lm's generator slows down when it passes each token on, as in a server: to
another thread, or to a process that passes the token on to a second process. Each listener computes
for a fraction of a millisecond per token. One sequence is generated at a time.

    python bench/listeners.py MODEL_FOLDER
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from decoding import WARM_UP, spread
from mlx_lm.generate import BatchGenerator
from mlx_lm.utils import load_model

PROMPT = 140
NOBODY = "nobody"


def compute(ms: float) -> None:
    end = time.perf_counter() + ms / 1e3
    while time.perf_counter() < end:
        pass


def listen(hear: Callable[[], object], tell: Callable[[], object], ms: float) -> None:
    while hear():
        compute(ms)
        tell()


def processes(ms: float) -> Callable[[], object]:
    """Starts two listening processes, the first of which passes each token on to the second.
    Returns the function that sends a token to the first. Call before MLX is used, since the
    processes are forked."""
    (first, tell_first), (second, tell_second) = os.pipe(), os.pipe()
    forked = multiprocessing.get_context("fork")
    steps = [(first, lambda: os.write(tell_second, b"x")), (second, lambda: None)]
    for pipe, tell in steps:
        work = (lambda pipe=pipe: os.read(pipe, 1), tell, ms)
        forked.Process(target=listen, args=work, daemon=True).start()
    return lambda: os.write(tell_first, b"x")


def thread(ms: float) -> Callable[[], object]:
    tokens: SimpleQueue[bool] = SimpleQueue()
    work = (tokens.get, lambda: None, ms)
    threading.Thread(target=listen, args=work, daemon=True).start()
    return lambda: tokens.put(True)


def step_ms(model: Any, tell: Callable[[], object], steps: int, seed: int) -> float:
    """The mean milliseconds from one token to the next; ``tell`` is called for each token."""
    rng = random.Random(seed)
    generator = BatchGenerator(model, completion_batch_size=1, prefill_batch_size=1)
    generator.insert([[rng.randrange(1000) for _ in range(PROMPT)]], [1 << 20])
    came: list[float] = []
    while len(came) <= WARM_UP + steps:
        if generator.next()[1]:
            came.append(time.perf_counter())
            tell()
    generator.close()
    return (came[-1] - came[WARM_UP]) / steps * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a model folder")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument(
        "--ms", type=float, default=0.3, help="milliseconds that a listener computes per token"
    )
    args = parser.parse_args()
    told: dict[str, Callable[[], object]] = {
        NOBODY: lambda: None,
        "two processes": processes(args.ms),
        "a thread": thread(args.ms),
    }
    model = load_model(args.model)[0]
    took: dict[str, list[float]] = {who: [] for who in told}
    for number in range(-1, args.rounds):  # round -1 warms up and is not counted
        for who, tell in told.items():
            ms = step_ms(model, tell, args.steps, number)
            if number >= 0:
                took[who].append(ms)
    print("| told to | step ms: median (range) over rounds | / nobody |\n|---|---|---|")
    for who, values in took.items():
        ratios = [a / b for a, b in zip(values, took[NOBODY], strict=True)]
        print(f"| {who} | {spread(values)} | {spread(ratios)} |", flush=True)


if __name__ == "__main__":
    try:
        main()
    finally:
        for process in multiprocessing.active_children():
            process.kill()
