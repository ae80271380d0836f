"""Prompts on their way into the cache.

A :class:`PrefillGroup` holds rows whose prompts are fed together, chunk by chunk. Rows that are
shorter than others in a chunk are padded on the right; mlx-lm's caches turn that into left padding
afterwards. The last token of a prompt is never fed here: it is the first input of decoding.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mayfly_worker.engine import caches
from mayfly_worker.engine.caches import Cache
from mayfly_worker.engine.chunks import bucket
from mayfly_worker.engine.sequence import SequenceState


@dataclass(slots=True)
class Prompt:
    """A row that is being prefilled. ``fed`` tokens are in the cache, the first ``cached`` of them
    since before; ``target`` are to be.

    ``copies`` are further rows that start from the same cache (``n`` choices of one prompt).
    ``stops`` are lengths at which a chunk has to end because the cache is worth keeping there, in
    ascending order.
    """

    key: str
    row: SequenceState
    fed: int
    copies: list[SequenceState]
    stops: list[int]
    cached: int = 0

    @property
    def target(self) -> int:
        return len(self.row.tokens) - 1

    @property
    def left(self) -> int:
        return self.target - self.fed

    def next_length(self, at_most: int) -> int:
        """How many tokens the next chunk takes of this row."""
        ahead = [s for s in self.stops if s > self.fed]
        end = min(self.fed + at_most, ahead[0] if ahead else self.target, self.target)
        return end - self.fed


class PrefillGroup:
    """Rows that are prefilled together. ``shape`` is the last chunk's: rows, tokens a row, and
    columns of the cache after it, all with their padding.

    ``bucketed`` pads the chunk and the cache to a few lengths (:func:`~.chunks.bucket`). CUDA
    plans each new shape of an attention anew, which was seen to take 100 ms where the pass itself
    takes 10; it is no use elsewhere.
    """

    def __init__(
        self,
        model: Any,
        prompts: list[Prompt],
        row_caches: Sequence[Cache],
        *,
        bucketed: bool = False,
    ) -> None:
        self._model = model
        self.prompts = prompts
        self.shape = (len(prompts), 0, 0)
        self._bucketed = bucketed
        # A single row keeps its plain cache: kinds that cannot be batched work that way.
        self._solo = len(prompts) == 1 and not bucketed
        self._cache = row_caches[0] if self._solo else caches.merge(row_caches)
        if bucketed and (held := max(p.fed for p in prompts)):
            caches.widen(self._cache, bucket(held))

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def left(self) -> int:
        """The most tokens that any row still needs."""
        return max((p.left for p in self.prompts), default=0)

    def feed(self, chunk: int) -> int:
        """Feeds up to ``chunk`` tokens of every row and waits for them; returns how many."""
        lengths = [p.next_length(chunk) for p in self.prompts]
        longest = max(lengths)
        if longest == 0:
            return 0
        width = min(bucket(longest), chunk) if self._bucketed else longest
        padding = [width - n for n in lengths]
        inputs = [
            p.row.tokens[p.fed : p.fed + n] + [0] * pad
            for p, n, pad in zip(self.prompts, lengths, padding, strict=True)
        ]
        ragged = any(padding)
        if ragged:
            for layer in self._cache:
                layer.prepare(lengths=lengths, right_padding=padding)
        self._model(mx.array(inputs), cache=self._cache)
        if ragged:
            for layer in self._cache:
                layer.finalize()
        caches.evaluate(self._cache)
        self.shape = (len(self.prompts), width, caches.columns(self._cache))
        for p, n in zip(self.prompts, lengths, strict=True):
            p.fed += n
        return sum(lengths)

    def take(self, index: int) -> Cache:
        """A copy of one row's cache, as a cache of its own (lazy arrays)."""
        if self._solo:
            return copy.deepcopy(self._cache)
        return caches.take(self._cache, index, self.prompts[index].fed)

    def _keep(self, cache: Cache, indices: Sequence[int]) -> Cache:
        return caches.keep(cache, indices, [self.prompts[i].fed for i in indices])

    def split(self, indices: Sequence[int]) -> Cache:
        """Takes rows out of the group; their cache comes back as that of a batch."""
        if self._solo:
            out = caches.merge([self._cache])
        elif len(indices) == len(self.prompts):
            out = self._cache
            caches.tighten(out, max(p.fed for p in self.prompts))
        else:
            out = self._keep(copy.deepcopy(self._cache), indices)
        self.remove(indices)
        return out

    def remove(self, indices: Sequence[int]) -> None:
        """Takes rows out; the others go on as if they had been alone."""
        gone = set(indices)
        if not gone:
            return
        stay = [i for i in range(len(self.prompts)) if i not in gone]
        if not self._solo and stay:
            self._cache = self._keep(self._cache, stay)
        self.prompts = [self.prompts[i] for i in stay]
