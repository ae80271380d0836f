"""Canary: fixed test prompts that are run through the real engine, to find a GPU that computes
wrongly.

Some faults of a GPU raise nothing: a kernel that did not run leaves zeros, and the answer is fluent
nonsense with status 200. So before a worker counts as ready, and from time to time while it is
idle, three short sequences go through the code that serves requests: greedy and sampled ones, of
different lengths and budgets, one of them started later than the others, so that padding, batching,
joins, removals, stored prefixes and both samplers take part. Their tokens have to equal the tokens
that were stored when this model first ran on this type of device, and no row's logits may be
constant or not finite (the engine raises if any are).

The canary also compiles most kernels that the first request would have to wait for.
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
"""Tokens that the longest sequence of the canary (a test run of fixed prompts) generates. Without a
fast BLAS a CPU takes a second for four tokens of a small model."""


class CanaryMismatch(RuntimeError):
    """The tokens generated for fixed test prompts differ from the stored ones: the device does not
    compute what it computed before."""


@dataclass(frozen=True, slots=True)
class Canary:
    """Self-test of a worker: runs fixed prompts through the engine, and compares the tokens with
    those that the first worker of this model generated, which are stored in ``references``. This
    finds faults of a GPU that raise no error."""

    loaded: LoadedModel
    references: ReferenceStore

    @classmethod
    def of(cls, loaded: LoadedModel, folder: str) -> Canary:
        """Makes the canary of a loaded model; the expected tokens are stored in ``folder``. If
        ``folder`` is empty, every run of the canary is compared with its first run in this
        process."""
        return cls(loaded, ReferenceStore.of(folder, loaded.card.digest))

    def check(self, counters: EngineCounters | None = None) -> None:
        """Runs the fixed prompts and compares the generated tokens with the stored tokens; stores
        the tokens if none are stored yet.

        Raises:
            CanaryMismatch: the tokens differ from the stored tokens.
            Exception: any error of the engine, unchanged.
        """
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
            batchable=loaded.probe.batchable,
            padding_safe=loaded.probe.padding_safe,
            mixed_states=loaded.probe.mixed_states,
            cuttable=loaded.probe.cuttable,
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
