"""Times decode steps of Mayfly's engine itself, without a server; shared by several benchmarks."""

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
"""Costs of a forward pass, in cached tokens, at which the engine always decodes all rows in one
batch (TOGETHER), or never does (APART)."""

GREEDY = SequenceSampling.greedy()
Emit = Callable[[list[Event]], None]
WARM_UP = 5


@dataclass(frozen=True)
class Decoder:
    """A loaded model with what the engine needs to know of it. ``price`` is the engine's estimate
    of a forward pass's fixed cost, in tokens of KV cache that could be read in the same time."""

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
        """Random prompts (token ids) of the given lengths."""
        rng = random.Random(0)
        return [[rng.randrange(self.found.width) for _ in range(n)] for n in lengths]

    def engine(
        self, rows: int, price: float, chunks: ChunkSizer, emit: Emit, **more: Any
    ) -> Engine:
        """A new engine for at most ``rows`` sequences at once, without a prefix cache."""
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
        """The median milliseconds of a decode step of sequences whose prompts have the given
        ``lengths`` in tokens."""
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
