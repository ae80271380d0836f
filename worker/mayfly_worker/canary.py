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

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mayfly_protocol.requests import Sampling
from mayfly_worker.engine.admission import Budget
from mayfly_worker.engine.chunks import ChunkSizer
from mayfly_worker.engine.gauges import Gauges
from mayfly_worker.engine.loop import Engine
from mayfly_worker.engine.sampler import RowSampling
from mayfly_worker.engine.types import Event, Row, Start, Step
from mayfly_worker.loading import Loaded
from mayfly_worker.prefix_cache import PrefixCache
from mayfly_worker.versions import versions

TEXT = "The mayfly lives for a day."
TOKENS = 8
"""Of the longest row. Without a fast BLAS a CPU takes a second for four of a small model's."""


class CanaryMismatch(RuntimeError):
    """The device computes, but not what it computed before."""


@dataclass(frozen=True, slots=True)
class Canary:
    """Sings for one loaded model. ``references`` is the folder where right answers are kept; with
    none, every run is compared with the first one of this process."""

    loaded: Loaded
    references: Path | None
    heard: dict[str, list[list[int]]]

    @classmethod
    def of(cls, loaded: Loaded, references: str) -> Canary:
        return cls(loaded, Path(references) if references else None, {})

    def sing(self, gauges: Gauges | None = None) -> None:
        """Raises CanaryMismatch if the tokens are not the stored ones; whatever the engine raises
        comes out as it is."""
        tokens = self._run(gauges)
        known = self._known()
        if known is None:
            self._store(tokens)
        elif tokens != known:
            raise CanaryMismatch(f"canary mismatch: expected tokens {known}, got {tokens}")

    def _run(self, gauges: Gauges | None) -> list[list[int]]:
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
            gauges=gauges,
        )
        *first, last = self._rows()
        late: Row | None = last
        for row in first:
            engine.commands.put(Start(str(row.id), [row]))
        drawn: dict[int, list[int]] = {row.id: [] for row in (*first, last)}
        ended = 0
        while ended < len(drawn):
            engine.turn()
            if drawn[first[0].id] and late is not None:
                engine.commands.put(Start(str(late.id), [late]))
                late = None
            for token in (t for e in events if isinstance(e, Step) for t in e.drawn):
                drawn[token.row].append(token.token)
                ended += token.end is not None
            events.clear()
        return list(drawn.values())

    def _rows(self) -> list[Row]:
        ids: list[int] = self.loaded.tokenizer.encode(TEXT)[:64] or [0]
        greedy = RowSampling.greedy()
        sampled = RowSampling(Sampling(seed=1, temperature=0.8, top_p=0.9))
        return [
            Row(0, ids, greedy, TOKENS),
            Row(1, ids[: max(1, len(ids) // 2)], sampled, TOKENS - 4),
            Row(2, ids[::-1], sampled, TOKENS - 2),
        ]

    @property
    def _key(self) -> str:
        """What decides the right answer: the question, the model, who computes it, and on what."""
        info: dict[str, Any] = dict(mx.device_info())
        device = str(info.get("device_name") or info.get("architecture") or mx.default_device())
        blas = os.environ.get("LD_PRELOAD", "")
        parts = (TEXT, TOKENS, self.loaded.card.digest, versions(), device, blas)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]

    def _known(self) -> list[list[int]] | None:
        if self._key in self.heard or self.references is None:
            return self.heard.get(self._key)
        try:
            stored = json.loads((self.references / f"{self._key}.json").read_text("utf-8"))
        except (FileNotFoundError, ValueError):
            return None  # never stored, or cut short by a full disk: it is stored anew
        tokens: list[list[int]] = stored["tokens"]
        return tokens

    def _store(self, tokens: list[list[int]]) -> None:
        self.heard[self._key] = tokens
        if self.references is None:
            return
        self.references.mkdir(parents=True, exist_ok=True)
        path = self.references / f"{self._key}.json"
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps({"text": TEXT, "tokens": tokens}), "utf-8")
        scratch.replace(path)
