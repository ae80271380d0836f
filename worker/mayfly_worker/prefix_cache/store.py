"""The prefix cache: KV states by the token sequence that led to them, bounded in bytes.

Two kinds of entry differ in the lengths at which they hit:

    trimmable   any length: the entry that shares the longest prefix with the query is
                trimmed to it. A longer sequence serves all its own prefixes, so only the
                longest sequence of each branch is kept.
    fixed       its own length alone (a sliding window that has wrapped, or a recurrent
                state, cannot go back), so each boundary that is stored is kept.

Hence a repeated prompt is found again only if its entry is trimmable or ends before its last token,
which must be left to prefill: for a model with fixed entries, store prompt[:-1].

The least recently used entry is dropped first, whatever its kind. Not thread-safe; an MLX cache
belongs to the thread that made it anyway.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import mlx.core as mx

from mayfly_worker.prefix_cache import layers
from mayfly_worker.prefix_cache.layers import LayerCache
from mayfly_worker.prefix_cache.radix import Node, RadixTree, Tokens, as_tokens

EntryKind: TypeAlias = Literal["system", "prompt", "answer"]
"""Boundary at which an entry of the prefix cache was stored: the end of the system prompt, of the
prompt or of the answer."""


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """KV state, from the prefix cache, after the first ``length`` tokens of a query.

    ``caches`` has one cache for each layer, for one sequence; the caller may change them. ``kind``
    is the boundary at which the state was stored: the end of a system prompt, of a prompt or of an
    answer.
    """

    length: int
    caches: list[LayerCache]
    kind: EntryKind


@dataclass(slots=True)
class PrefixCacheStats:
    """Counts of a prefix cache since it was made. ``refused`` entries were larger than the whole
    prefix cache."""

    hits: int = 0
    misses: int = 0
    hit_tokens: int = 0
    evictions: int = 0
    refused: int = 0


@dataclass(frozen=True, slots=True)
class _Entry:
    caches: list[LayerCache]
    nbytes: int
    kind: EntryKind
    tree: RadixTree[_Entry]


class PrefixCache:
    """Stores KV states of token sequences in at most ``max_bytes``, and finds the longest stored
    prefix of a new prompt. Prefixes under ``min_length`` tokens are ignored.

    ``nbytes`` is the sum of the stored arrays' sizes.
    """

    def __init__(self, max_bytes: int, *, min_length: int = 16) -> None:
        if max_bytes < 0:
            raise ValueError(f"max_bytes must not be negative, but is {max_bytes}")
        if min_length < 1:
            raise ValueError(f"min_length must be at least 1, but is {min_length}")
        self.max_bytes = max_bytes
        self.min_length = min_length
        self.nbytes = 0
        self.stats = PrefixCacheStats()
        self._trimmable: RadixTree[_Entry] = RadixTree()
        self._fixed: RadixTree[_Entry] = RadixTree()
        self._by_use: OrderedDict[Node[_Entry], _Entry] = OrderedDict()  # oldest first

    def __len__(self) -> int:
        return len(self._by_use)

    def lookup(self, tokens: Sequence[int] | Tokens, at_most: int) -> PrefixHit | None:
        """Finds the longest prefix of the first ``at_most`` of ``tokens`` whose KV state is stored;
        None if no such prefix is stored.

        ``at_most`` is usually len(tokens) - 1, because one token must be left to prefill.
        """
        query = as_tokens(tokens[: max(at_most, 0)])
        similar = self._trimmable.match(query)
        node, length = similar.nearest, similar.common
        boundaries = self._fixed.match(query).prefixes
        if boundaries and boundaries[-1].length > length:
            node, length = boundaries[-1], boundaries[-1].length
        if node is None or length < self.min_length:
            self.stats.misses += 1
            return None
        self._by_use.move_to_end(node)
        self.stats.hits += 1
        self.stats.hit_tokens += length
        entry = self._by_use[node]
        return PrefixHit(length, layers.copied(entry.caches, length), entry.kind)

    def insert(
        self,
        tokens: Sequence[int] | Tokens,
        caches: Sequence[LayerCache],
        kind: EntryKind = "prompt",
    ) -> None:
        """Stores the KV state that ``caches``, one for each layer, hold after exactly ``tokens``.

        The caches are copied, and the copies are evaluated asynchronously, so that neither the
        batch that the caches came from nor its graph is kept alive. A state that is stored already,
        of fewer than ``min_length`` tokens, or larger than the whole prefix cache is not stored.

        Raises:
            ValueError: a layer holds a number of tokens other than that of ``tokens``, or no layer
                holds any.
        """
        sequence = as_tokens(tokens)
        if len(sequence) < self.min_length:
            return
        layers.check_length(caches, len(sequence))
        trimmable = layers.trimmable(caches)
        tree = self._trimmable if trimmable else self._fixed
        match = tree.match(sequence)
        same = match.nearest if trimmable else match.prefixes[-1] if match.prefixes else None
        if same is not None and min(match.common, same.length) == len(sequence):
            self._by_use.move_to_end(same)
            return

        own = layers.detached(caches)
        stored = layers.arrays(own)
        nbytes = sum(array.nbytes for array in stored)
        if nbytes == 0:
            raise ValueError(f"the caches given for {len(sequence)} tokens are empty")
        if nbytes > self.max_bytes:
            self.stats.refused += 1
            return
        if trimmable:
            for shorter in match.prefixes:
                self._forget(shorter)
        self.evict_to(self.max_bytes - nbytes)
        mx.async_eval(stored)
        entry = _Entry(own, nbytes, kind, tree)
        self._by_use[tree.insert(sequence, entry)] = entry
        self.nbytes += nbytes

    def evict_to(self, nbytes: int) -> None:
        """Drops the least recently used entries until the entries take at most ``nbytes``."""
        while self._by_use and self.nbytes > nbytes:
            self._forget(next(iter(self._by_use)))
            self.stats.evictions += 1

    def clear(self) -> None:
        """Drops every entry of the prefix cache; the counts in ``stats`` stay."""
        for node in list(self._by_use):
            self._forget(node)

    def _forget(self, node: Node[_Entry]) -> None:
        entry = self._by_use.pop(node)
        entry.tree.remove(node)
        self.nbytes -= entry.nbytes
