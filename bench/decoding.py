"""Decode steps of the engine itself, without a server."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from mayfly_worker.engine import caches
from mayfly_worker.engine.admission import Budget
from mayfly_worker.engine.chunks import ChunkSizer
from mayfly_worker.engine.sampler import SequenceSampling
from mayfly_worker.engine.scheduler import Engine
from mayfly_worker.engine.sequence import Event, SequenceState, Start
from mayfly_worker.engine.sub_batches import pass_cost_tokens
from mayfly_worker.model.probe import Probe, probe
from mayfly_worker.model.reference_store import ReferenceStore
from mayfly_worker.prefix_cache import PrefixCache

TOGETHER, APART = float("inf"), 0.0
"""Prices of a forward pass at which rows always share one, or never do."""

GREEDY = SequenceSampling.greedy()
Emit = Callable[[list[Event]], None]
WARM_UP = 5


@dataclass(frozen=True)
class Decoder:
    """A loaded model. ``price`` is what the engine takes a forward pass for, in tokens of cache."""

    model: Any
    found: Probe
    price: float

    @classmethod
    def of(cls, folder: Path) -> Decoder:
        return cls.with_model(load_model(folder)[0])

    @classmethod
    def with_model(cls, model: Any) -> Decoder:
        found = probe(model, caches.factory(model), ReferenceStore.of("", ""))
        parameters: list[tuple[str, Any]] = list(tree_flatten(model.parameters()))  # type: ignore[arg-type]
        weights = sum(p.nbytes for _, p in parameters)
        return cls(model, found, pass_cost_tokens(weights, found.cost.per_token))

    def prompts(self, lengths: Sequence[int]) -> list[list[int]]:
        """Random ones."""
        rng = random.Random(0)
        return [[rng.randrange(self.found.width) for _ in range(n)] for n in lengths]

    def engine(
        self, rows: int, price: float, chunks: ChunkSizer, emit: Emit, **more: Any
    ) -> Engine:
        """One that keeps no prefixes."""
        return Engine(
            self.model,
            self.found.width,
            budget=Budget(rows, 1 << 60, self.found.cost.per_token),
            chunks=chunks,
            prefixes=PrefixCache(0),
            emit=emit,
            new_cache=caches.factory(self.model),
            padding_safe=self.found.padding_safe,
            pass_cost_tokens=price,
            **more,
        )

    def step_ms(
        self,
        lengths: Sequence[int],
        steps: int,
        *,
        price: float = TOGETHER,
        sampling: SequenceSampling = GREEDY,
        logprobs: int | None = None,
    ) -> float:
        """The median time of a decode step of rows with so many tokens."""
        engine = self.engine(len(lengths), price, ChunkSizer(1.0, 1.0), lambda events: None)
        for i, tokens in enumerate(self.prompts(lengths)):
            row = SequenceState(i, tokens, sampling, 1 << 20, logprobs=logprobs)
            engine.commands.put(Start(str(i), [row]))
        while engine.running < len(lengths) or engine.counters.phase != "decode":
            engine.turn()
        return median_ms(engine.turn, steps)


def median_ms(step: Callable[[], object], steps: int) -> float:
    for _ in range(WARM_UP):
        step()
    took = []
    for _ in range(steps):
        began = time.perf_counter()
        step()
        took.append((time.perf_counter() - began) * 1e3)
    return statistics.median(took)


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"
