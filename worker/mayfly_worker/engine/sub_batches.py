"""The decode batch, split in two where some sequences are much longer than the others.

::

    one batch                              two
    short  ........................##      short  ##
    short  ........................##      short  ##
    long   ##########################      long   ##########################
           padding is read at each step           the weights are read twice

A batch keeps every row at the length of its longest, and each step reads all of it. A second batch
costs a second forward pass a step. Both costs can be counted in tokens of one row's cache, so rows
join the sub-batch where the sum is least.

From outside, the sub-batches are one batch: row i is the same whichever sub-batch it is in.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import mlx.core as mx

from mayfly_worker.engine.caches import Cache
from mayfly_worker.engine.decode import DecodeBatch
from mayfly_worker.engine.sequence import SequenceState

MOST = 2
"""Largest number of sub-batches."""

METAL_LAUNCH_BYTES = 1 << 30
CUDA_LAUNCH_BYTES = 2 << 30
"""Bytes that attention over padding reads in the time that the host takes to launch a forward pass:
measured on an H200 (``bench/ragged.py``), where it is a tenth of what the memory delivers;
estimated for Metal. On a CPU the launch costs nothing beside the pass."""


def pass_cost_tokens(weight_bytes: int, bytes_per_token: int) -> float:
    """Returns the cost of a forward pass, in tokens of one row's cache that are read in the same
    time.

    Infinite where a cache does not grow with its tokens, or only up to a window.
    """
    if bytes_per_token <= 0:
        return float("inf")
    launch = METAL_LAUNCH_BYTES if mx.metal.is_available() else 0
    launch = CUDA_LAUNCH_BYTES if mx.cuda.is_available() else launch
    return (weight_bytes + launch) / bytes_per_token


def cheapest_batch(
    batches: Sequence[Sequence[int]], joining: Sequence[int], pass_cost: float
) -> int:
    """Returns the index of the batch that rows should join; ``len(batches)`` means a new one.

    Args:
        batches: lengths of the rows of each batch.
        joining: lengths of the rows that join. They stay together.
        pass_cost: cost of a forward pass, see :func:`pass_cost_tokens`.
    """
    if not batches:
        return 0

    def added(batch: Sequence[int]) -> int:
        """Tokens that the batch reads more at each step than before."""
        rows = [*batch, *joining]
        return len(rows) * max(rows) - len(batch) * max(batch)

    # Of equals the larger one: the smaller one will run empty, which saves a forward pass.
    best = min(range(len(batches)), key=lambda i: (added(batches[i]), -len(batches[i])))
    alone = len(joining) * max(joining) + pass_cost
    return len(batches) if len(batches) < MOST and alone < added(batches[best]) else best


class SubBatches:
    """One or two decode batches with the interface of one, except that the caller steps each of
    ``batches`` itself."""

    def __init__(self, model: Any, width: int, pass_cost: float) -> None:
        self._model = model
        self._width = width
        self._pass_cost = pass_cost
        self.batches: list[DecodeBatch] = []

    def __len__(self) -> int:
        return sum(map(len, self.batches))

    @property
    def rows(self) -> list[SequenceState]:
        return list(chain.from_iterable(batch.rows for batch in self.batches))

    def join(self, rows: Sequence[SequenceState], cache: Cache) -> None:
        """Adds sequences with their batched cache, which holds all but the last of their tokens."""
        lengths = [[len(row.tokens) for row in batch.rows] for batch in self.batches]
        index = cheapest_batch(lengths, [len(row.tokens) for row in rows], self._pass_cost)
        if index == len(self.batches):
            self.batches.append(DecodeBatch(self._model, self._width))
        self.batches[index].join(rows, cache)

    def remove(self, rows: Sequence[int]) -> None:
        """Removes sequences by row index."""
        gone = set(rows)
        start = 0
        for batch in self.batches:
            size = len(batch)
            if own := [i for i in range(size) if start + i in gone]:
                batch.remove(own)
            start += size
        self.batches = [batch for batch in self.batches if len(batch)]

    def take(self, row: int) -> tuple[list[int], Cache]:
        """Returns the tokens that a row's cache holds, and a copy of the cache (lazy arrays)."""
        for batch in self.batches:
            if row < len(batch):
                return batch.take(row)
            row -= len(batch)
        raise IndexError(f"row {row} is not in any sub-batch")
