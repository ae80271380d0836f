"""The canary: a fixed prompt through the real engine, before anybody depends on it.

Some faults of a GPU raise nothing: a kernel that did not run leaves zeros behind, and what follows
is fluent nonsense with status 200. So before a worker is READY, and now and then while it is idle,
three short rows go through the same code that serves requests: greedy and sampled, of different
lengths and budgets, one of them later than the others, so that padding, batching, joins, leaves,
stored prefixes and both samplers take part. Their tokens have to be those that
were stored when this model first ran on this kind of device, and no row's logits may be constant or
not finite (the engine raises then).

It also compiles most kernels that the first request would have to wait for.
"""

from __future__ import annotations

from dataclasses import dataclass

from mayfly_protocol.requests import Sampling
from mayfly_worker.engine.admission import Budget
from mayfly_worker.engine.chunks import ChunkSizer
from mayfly_worker.engine.engine_counters import EngineCounters
from mayfly_worker.engine.sampler import SequenceSampling
from mayfly_worker.engine.scheduler import Engine
from mayfly_worker.engine.sequence import Event, SequenceState, Start, StepResult
from mayfly_worker.model.loading import LoadedModel
from mayfly_worker.model.reference_store import ReferenceStore
from mayfly_worker.prefix_cache import PrefixCache

TEXT = "The mayfly lives for a day."
TOKENS = 8
"""Of the longest row. Without a fast BLAS a CPU takes a second for four of a small model's."""


class CanaryMismatch(RuntimeError):
    """The device computes, but not what it computed before."""


@dataclass(frozen=True, slots=True)
class Canary:
    """Sings for one loaded model. ``references`` are where right answers are kept."""

    loaded: LoadedModel
    references: ReferenceStore

    @classmethod
    def of(cls, loaded: LoadedModel, folder: str) -> Canary:
        """``folder`` is where references are; with none, every run is compared with the first one
        of this process."""
        return cls(loaded, ReferenceStore.of(folder, loaded.card.digest))

    def check(self, counters: EngineCounters | None = None) -> None:
        """Raises CanaryMismatch if the tokens are not the stored ones; whatever the engine raises
        comes out as it is."""
        tokens = self._run(counters)
        question = ("canary", TEXT, TOKENS)
        known = self.references.known(question)
        if known is None:
            self.references.store(question, {"text": TEXT, "tokens": tokens})
        elif tokens != known["tokens"]:
            expected = known["tokens"]
            raise CanaryMismatch(f"canary mismatch: expected tokens {expected}, got {tokens}")

    def _run(self, counters: EngineCounters | None) -> list[list[int]]:
        loaded = self.loaded
        events: list[Event] = []
        engine = Engine(
            loaded.model,
            loaded.probe.width,
            budget=Budget(3 if loaded.probe.batchable else 1, 1 << 60, 0),
            chunks=ChunkSizer(1.0, 1.0),
            prefixes=PrefixCache(1 << 30),
            emit=events.extend,
            new_cache=loaded.new_cache,
            padding_safe=loaded.probe.padding_safe,
            bucketed=loaded.bucketed,
            counters=counters,
        )
        *first, last = self._rows()
        late: SequenceState | None = last
        for row in first:
            engine.commands.put(Start(str(row.id), [row]))
        drawn: dict[int, list[int]] = {row.id: [] for row in (*first, last)}
        ended = 0
        while ended < len(drawn):
            engine.turn()
            if drawn[first[0].id] and late is not None:
                engine.commands.put(Start(str(late.id), [late]))
                late = None
            for token in (t for e in events if isinstance(e, StepResult) for t in e.tokens):
                drawn[token.row].append(token.token)
                ended += token.end is not None
            events.clear()
        return list(drawn.values())

    def _rows(self) -> list[SequenceState]:
        ids: list[int] = self.loaded.tokenizer.encode(TEXT)[:64] or [0]
        greedy = SequenceSampling.greedy()
        sampled = SequenceSampling(Sampling(seed=1, temperature=0.8, top_p=0.9))
        return [
            SequenceState(0, ids, greedy, TOKENS),
            SequenceState(1, ids[: max(1, len(ids) // 2)], sampled, TOKENS - 4),
            SequenceState(2, ids[::-1], sampled, TOKENS - 2),
        ]
