"""A harness that drives the inference engine without threads or sockets: takes requests as token
ids, runs the engine's turns, and collects the generated tokens."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mayfly_protocol.requests import Sampling
from mayfly_worker.engine import caches
from mayfly_worker.engine.admission import Budget
from mayfly_worker.engine.chunks import ChunkSizer
from mayfly_worker.engine.sampler import SequenceSampling
from mayfly_worker.engine.scheduler import Engine
from mayfly_worker.engine.sequence import (
    CancelCommand,
    Event,
    SampledToken,
    SequenceState,
    Start,
    Started,
    StepResult,
)
from mayfly_worker.prefix_cache import PrefixCache

GREEDY = Sampling(seed=0, temperature=0.0)


@dataclass
class EngineRequest:
    """A request to the engine. ``tokens`` are the prompt's and, for a request that continues after
    the loss of its worker, those generated before; ``generated`` is the number of the latter."""

    tokens: list[int]
    sampling: Sampling = GREEDY
    max_tokens: int = 12
    n: int = 1
    generated: int = 0
    stop_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    matcher: Callable[[], Any] | None = None
    boundaries: tuple[int, ...] = ()
    banned: tuple[int, ...] = ()
    banned_until: int = 0
    suspect: bool = False


@dataclass
class EngineAnswer:
    """The generated tokens of each choice, and the number of prompt tokens found in the prefix
    cache."""

    sampled: dict[int, list[SampledToken]] = field(default_factory=dict)
    cached: int = 0

    def ids(self, choice: int = 0) -> list[int]:
        return [d.token for d in self.sampled.get(choice, [])]


class FixedChunks(ChunkSizer):
    """A sizer of prefill chunks with two fixed sizes in tokens: ``alone``, without decoding beside
    the prefill, and ``shared``, with decoding."""

    def __init__(self, alone: int, shared: int) -> None:
        super().__init__(1.0, 1.0)
        self._alone = alone
        self._shared = shared

    def tokens(self, *, decoding: bool) -> int:
        return self._shared if decoding else self._alone


class EngineHarness:
    """An inference engine with a model and a prefix cache, driven turn by turn by the test."""

    def __init__(
        self,
        model: Any,
        width: int,
        *,
        prefix_bytes: int = 1 << 28,
        max_rows: int = 32,
        kv_bytes: int = 1 << 30,
        pass_bytes: int = 1 << 40,
        chunks: ChunkSizer | None = None,
        batchable: bool = True,
        padding_safe: bool = True,
        mixed_states: bool = True,
        cuttable: bool = True,
        new_cache: caches.Factory | None = None,
        max_kv_size: int | None = None,
        kv_bits: int | None = None,
        kv_group_size: int | None = None,
        bucketed: bool = False,
        pass_cost_tokens: float = float("inf"),
    ) -> None:
        self.events: list[Event] = []
        self.prefixes = PrefixCache(prefix_bytes)
        self.engine = Engine(
            model,
            width,
            budget=Budget(max_rows, kv_bytes, 256, pass_bytes=pass_bytes),
            chunks=chunks or ChunkSizer(1.0, 1.0),
            prefixes=self.prefixes,
            emit=self.events.extend,
            new_cache=new_cache or caches.factory(model, max_kv_size, kv_bits, kv_group_size),
            batchable=batchable,
            padding_safe=padding_safe,
            mixed_states=mixed_states,
            cuttable=cuttable,
            bucketed=bucketed,
            pass_cost_tokens=pass_cost_tokens,
        )
        self._max_rows = max_rows
        self._keys = map(str, itertools.count())
        self._rows = itertools.count()
        self._owner: dict[int, tuple[str, int]] = {}
        self.answers: dict[str, EngineAnswer] = {}
        self.open: dict[str, set[int]] = {}

    def submit(self, ask: EngineRequest) -> str:
        key = next(self._keys)
        rows = []
        for choice in range(ask.n):
            row = SequenceState(
                next(self._rows),
                list(ask.tokens),
                SequenceSampling(ask.sampling, choice, ask.banned, ask.banned_until),
                ask.max_tokens,
                ask.generated,
                ask.stop_ids,
                ask.logprobs,
                ask.matcher() if ask.matcher else None,
                ask.suspect,
            )
            self._owner[row.id] = (key, choice)
            rows.append(row)
        self.answers[key] = EngineAnswer()
        self.open[key] = {row.id for row in rows}
        for together in [rows] if self._max_rows > 1 else [[row] for row in rows]:
            self.engine.commands.put(Start(key, together, ask.boundaries, key))
        return key

    def cancel(self, key: str) -> None:
        self.engine.commands.put(CancelCommand(key))
        self.open.pop(key)

    def turn(self) -> None:
        self.engine.turn()
        for event in self.events:
            if isinstance(event, Started):
                self.answers[event.key].cached += event.cached
            if isinstance(event, StepResult):
                for sampled in event.tokens:
                    self._note(sampled)
        self.events.clear()

    def _note(self, sampled: SampledToken) -> None:
        key, choice = self._owner[sampled.row]
        self.answers[key].sampled.setdefault(choice, []).append(sampled)
        if sampled.end and key in self.open:
            self.open[key].discard(sampled.row)
            if not self.open[key]:
                del self.open[key]

    def finish(self) -> None:
        """Runs the engine's turns until every request that was not cancelled has its answer."""
        while self.open:
            self.turn()

    def run_with_cancels(
        self, asks: Sequence[EngineRequest], rng: random.Random, most_turns: int
    ) -> dict[str, EngineRequest]:
        """Submits requests with up to ``most_turns`` - 1 engine turns between them, and cancels
        about three in ten. Waits until the others are answered; returns those by their keys."""
        kept = {}
        for ask in asks:
            key = self.submit(ask)
            for _ in range(rng.randrange(most_turns)):
                self.turn()
            if rng.random() < 0.3 and key in self.open:
                self.cancel(key)
            else:
                kept[key] = ask
        self.finish()
        return kept

    def run(self, asks: Sequence[EngineRequest]) -> list[EngineAnswer]:
        keys = [self.submit(ask) for ask in asks]
        self.finish()
        return [self.answers[key] for key in keys]
