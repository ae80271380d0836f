"""Measures the time to first token of prompts that come in a burst, on a device that spends extra
time planning each new tensor shape, as CUDA does. Runs the engine itself, without a server.

The device's costs are simulated, so that any machine will do. A second engine, for comparison,
mistakes the planning time of a shape for the device's speed.

    python bench/bursts.py MODEL_FOLDER

The default costs are those of an 8B model on an H200, see RESULTS.md. ``--real`` simulates nothing
and measures the machine's own device.
"""

from __future__ import annotations

import argparse
import random
import statistics
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from decoding import GREEDY, TOGETHER, Decoder, spread

from mayfly_worker.engine import caches
from mayfly_worker.engine.chunks import ChunkSizer
from mayfly_worker.engine.sequence import Event, SequenceState, Start, StepResult

ANSWER = 24


class Credulous(ChunkSizer):
    def measured(self, tokens: int, seconds: float, *, planned: bool = False) -> None:
        super().measured(tokens, seconds)


class Simulated:
    """A model on a simulated device: each forward pass takes the simulated time. The real pass has
    to be faster than the simulated time."""

    def __init__(self, model: Any, args: argparse.Namespace) -> None:
        self._model = model
        self._args = args
        self.planned: set[tuple[int, ...]] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, tokens: mx.array, cache: caches.Cache) -> mx.array:
        began = time.perf_counter()
        logits: mx.array = self._model(tokens, cache=cache)
        mx.eval(logits)
        took = time.perf_counter() - began
        time.sleep(max(0.0, self._cost_s((*tokens.shape, caches.columns(cache))) - took))
        return logits

    def _cost_s(self, shape: tuple[int, ...]) -> float:
        rows, tokens, _ = shape
        if tokens == 1:
            return float(self._args.step_ms) / 1e3
        cost = self._args.pass_ms / 1e3 + rows * tokens * self._args.token_us / 1e6
        if shape not in self.planned:
            self.planned.add(shape)
            cost += self._args.plan_ms / 1e3
        return float(cost)


class Burst:
    """An engine that is given bursts of prompts, one burst after the other."""

    def __init__(self, decoder: Decoder, chunks: ChunkSizer, args: argparse.Namespace) -> None:
        self._args = args
        self._width = decoder.found.width
        self._device = None if args.real else Simulated(decoder.model, args)
        self._came: dict[int, float] = {}
        self._rows = 0
        if self._device:
            decoder = replace(decoder, model=self._device)
        self._engine = decoder.engine(args.prompts, TOGETHER, chunks, self._emit, bucketed=True)

    def _emit(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, StepResult):
                for drawn in event.tokens:
                    self._came.setdefault(drawn.row, time.perf_counter())

    @property
    def planned(self) -> int:
        """Number of distinct tensor shapes that the simulated device has seen so far; 0 if the
        device is real."""
        return len(self._device.planned) if self._device else 0

    def run(self, seed: int) -> list[float]:
        """Runs one burst; returns the milliseconds to each prompt's first token, ascending."""
        rng = random.Random(seed)
        ids = range(self._rows, self._rows + self._args.prompts)
        self._rows += self._args.prompts
        sent: dict[int, float] = {}

        def send() -> None:
            for row in ids:
                tokens = [rng.randrange(self._width) for _ in range(rng.randrange(132, 158))]
                sent[row] = time.perf_counter()
                self._engine.commands.put(
                    Start(str(row), [SequenceState(row, tokens, GREEDY, ANSWER)])
                )
                time.sleep(self._args.every_ms / 1e3)

        sender = threading.Thread(target=send)
        sender.start()
        while not self._came.keys() >= set(ids):
            self._engine.turn()
        sender.join()
        while self._engine.running:
            self._engine.turn()
        return sorted((self._came[row] - sent[row]) * 1e3 for row in ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a tiny model's folder")
    parser.add_argument("--bursts", type=int, default=10)
    parser.add_argument(
        "--prompts", type=int, default=32, help="prompts in a burst, about 145 tokens each"
    )
    parser.add_argument("--every-ms", type=float, default=2.0, help="time between two prompts")
    parser.add_argument("--plan-ms", type=float, default=120.0, help="cost of each new shape")
    parser.add_argument("--pass-ms", type=float, default=15.0, help="cost of each prefill chunk")
    parser.add_argument("--token-us", type=float, default=56.0, help="cost of each prefill token")
    parser.add_argument("--step-ms", type=float, default=20.0, help="cost of a decode step")
    parser.add_argument("--real", action="store_true", help="measure the machine's own device")
    args = parser.parse_args()
    decoder = Decoder.of(args.model)
    contenders = {"planning apart": Burst(decoder, ChunkSizer(1.0, 0.25), args)}
    if not args.real:
        contenders["planning as speed"] = Burst(decoder, Credulous(1.0, 0.25), args)
    print("| burst | who | first token ms: p50 / last | shapes so far |\n|---|---|---|---|")
    last: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(args.bursts):
        for name, burst in contenders.items():
            waited = burst.run(number)
            last[name].append(waited[-1])
            p50, p99 = statistics.median(waited), waited[-1]
            print(
                f"| {number + 1} | {name} | {p50:.0f} / {p99:.0f} | {burst.planned} |", flush=True
            )
    if not args.real:
        ratios = [a / b for a, b in zip(*last.values(), strict=True)]
        print(f"\nratio of the last ones: {spread(ratios)}")


if __name__ == "__main__":
    main()
