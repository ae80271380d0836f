"""Prefill: feeding prompts to the model in groups, chunk by chunk.

In a chunk, shorter prompts are padded on the right; mlx-lm's caches turn this padding into left
padding afterwards. The last token of a prompt is not fed in prefill: it is the first input of
decoding.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mayfly_worker.engine import caches
from mayfly_worker.engine.caches import Cache
from mayfly_worker.engine.chunks import MOST, SMALLEST, bucket
from mayfly_worker.engine.logprobs import prompt_logprobs
from mayfly_worker.engine.sequence import PromptScored, SequenceState, Start

PADDING_LIMIT = 2.0
"""Largest ratio of the longest to the shortest prompt that are prefilled as one group."""


@dataclass(slots=True)
class Prompt:
    """A prompt in prefill: ``fed`` of ``target`` tokens are in the KV cache, of which the first
    ``cached`` came from the prefix cache.

    ``copies`` are further sequences that start from the same KV state (``n`` choices of one
    prompt). ``stops`` are prompt lengths, in ascending order, at which a chunk has to end because
    the KV state at that length is stored in the prefix cache. ``logprobs`` is the number of
    alternatives with which the prompt's tokens are scored; None if they are not.
    """

    key: str
    row: SequenceState
    fed: int
    copies: list[SequenceState]
    stops: list[int]
    cached: int = 0
    logprobs: int | None = None

    @classmethod
    def of(cls, start: Start, cached: int) -> Prompt:
        """Makes the Prompt of a request whose first ``cached`` tokens are in the prefix cache."""
        leader, *copies = start.rows
        stops = sorted(b for b in set(start.boundaries) if cached < b < len(leader.tokens) - 1)
        return cls(start.key, leader, cached, copies, stops, cached, start.prompt_logprobs)

    @property
    def target(self) -> int:
        return len(self.row.tokens) - 1

    @property
    def left(self) -> int:
        return self.target - self.fed

    @property
    def uncut(self) -> int:
        """Number of tokens of the next chunk with which nothing is fed otherwise than when it came:
        the prompt whole, and tokens that other workers generated one by one."""
        return max(1, len(self.row.tokens) - self.row.generated - 1 - self.fed)

    def next_length(self, at_most: int) -> int:
        """Returns the number of tokens of this prompt that the next chunk takes: at most
        ``at_most``, and not beyond the next of the prompt's ``stops``."""
        ahead = [s for s in self.stops if s > self.fed]
        end = min(self.fed + at_most, ahead[0] if ahead else self.target, self.target)
        return end - self.fed

    def scores(self, logits: mx.array, alternatives: int) -> PromptScored:
        """Waits for the device and returns the log-probabilities of the tokens that follow those
        that are fed; ``logits``, shape [tokens, width], predict them."""
        tokens = self.row.tokens[self.fed + 1 : self.fed + 1 + logits.shape[0]]
        return PromptScored(self.key, self.row.id, prompt_logprobs(logits, tokens, alternatives))


def fit_together(prompts: list[Prompt], room: int) -> bool:
    """True if the prompts fit into one prefill chunk of ``room`` tokens, padding included, the
    longest is at most twice as long as the shortest, and all or none of them are scored."""
    if len({p.logprobs is None for p in prompts}) > 1:
        return False
    lengths = [max(p.left, SMALLEST) for p in prompts]
    longest = max(lengths)
    return longest <= PADDING_LIMIT * min(lengths) and longest * len(lengths) <= room


class PrefillGroup:
    """Prompts that are prefilled together.

    ``shape`` is the shape of the last chunk: rows, tokens of each row, and columns of the KV cache
    after the chunk, all with padding. ``bucketed`` pads chunk and cache to a few lengths
    (:func:`~.chunks.bucket`), because CUDA plans attention anew for each new shape: planning was
    measured at 100 ms where the forward pass itself takes 10 ms. Other devices gain nothing from
    it. With ``batchable`` false, a single prompt's cache stays the plain one in decoding, too.
    ``scored`` are the log-probabilities of the tokens that the last chunk has predicted, if the
    prompts are scored.
    """

    def __init__(
        self,
        model: Any,
        prompts: list[Prompt],
        row_caches: Sequence[Cache],
        *,
        bucketed: bool = False,
        batchable: bool = True,
    ) -> None:
        self._model = model
        self._batchable = batchable
        self.prompts = prompts
        self.scored: list[PromptScored] = []
        self.shape = (len(prompts), 0, 0)
        self._bytes_per_token = 0.0  # of the last chunk's forward pass, padding included
        self._bucketed = bucketed
        # A single prompt keeps its plain cache, so that kinds which cannot be batched work.
        self._solo = len(prompts) == 1 and not bucketed
        self._cache = row_caches[0] if self._solo else caches.merge(row_caches)
        if bucketed and (held := max(p.fed for p in prompts)):
            caches.widen(self._cache, bucket(held))

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def scoring(self) -> bool:
        """True if the group's prompts are scored."""
        return any(p.logprobs is not None for p in self.prompts)

    @property
    def left(self) -> int:
        """Largest number of tokens that any prompt of the group still has to be fed."""
        return max((p.left for p in self.prompts), default=0)

    def room(self, nbytes: int) -> int:
        """Returns the number of tokens, over all prompts, whose forward pass takes ``nbytes`` if
        each takes as much as in the last chunk; at least 1."""
        if not self._bytes_per_token:
            return MOST
        return max(1, min(int(nbytes / self._bytes_per_token), MOST))

    def feed(self, chunk: int) -> int:
        """Feeds up to ``chunk`` tokens of every prompt to the model, waits for the device, and
        returns the number of tokens fed, over all prompts. Resets MLX's peak memory."""
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
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        logits = self._model(mx.array(inputs), cache=self._cache)
        if ragged:
            for layer in self._cache:
                # Some models make caches for layers that use none.
                if getattr(layer, "keys", layer) is not None:
                    layer.finalize()
        caches.evaluate(self._cache)
        self._bytes_per_token = (mx.get_peak_memory() - before) / (len(self.prompts) * width)
        self.scored = [
            p.scores(logits[i, :n], asked)
            for i, (p, n) in enumerate(zip(self.prompts, lengths, strict=True))
            if n and (asked := p.logprobs) is not None
        ]
        self.shape = (len(self.prompts), width, caches.columns(self._cache))
        for p, n in zip(self.prompts, lengths, strict=True):
            p.fed += n
        return sum(lengths)

    def take(self, index: int) -> Cache:
        """Copies the KV cache of one prompt out of the group's batch (lazy arrays)."""
        if self._solo:
            return copy.deepcopy(self._cache)
        return caches.take(self._cache, index, self.prompts[index].fed)

    def _keep(self, cache: Cache, indices: Sequence[int]) -> Cache:
        return caches.keep(cache, indices, [self.prompts[i].fed for i in indices])

    def split(self, indices: Sequence[int]) -> Cache:
        """Removes prompts from the group, and returns their KV caches as one batch."""
        if self._solo:
            out = caches.merge([self._cache]) if self._batchable else self._cache
        elif len(indices) == len(self.prompts):
            out = self._cache
            caches.tighten(out, max(p.fed for p in self.prompts))
        else:
            out = self._keep(copy.deepcopy(self._cache), indices)
        self.remove(indices)
        return out

    def remove(self, indices: Sequence[int]) -> None:
        """Removes prompts from the group; the other prompts go on as if they had been alone."""
        gone = set(indices)
        if not gone:
            return
        stay = [i for i in range(len(self.prompts)) if i not in gone]
        if not self._solo and stay:
            self._cache = self._keep(self._cache, stay)
        self.prompts = [self.prompts[i] for i in stay]
