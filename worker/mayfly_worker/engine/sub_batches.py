"""The rows that generate, in one batch or in two: those much longer than the others apart.

::

    one batch                              two
    short  ........................##      short  ##
    short  ........................##      short  ##
    long   ##########################      long   ##########################
           padding is read at each step           the weights are read twice

A batch keeps every row at the length of its longest, and each step reads all of it. A second batch
costs a second forward pass a step. Both can be counted in tokens of one row's cache, so rows join
where the sum is least.

From outside, the lanes are one batch: row i is the same whatever lane it is in.
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

METAL_LAUNCH_BYTES = 1 << 30
CUDA_LAUNCH_BYTES = 2 << 30
"""What attention over padding reads in the milliseconds that the host takes to launch a forward
pass: measured on an H200 (``bench/ragged.py``), where it is a tenth of what the memory delivers;
estimated for Metal. On a CPU a launch costs nothing beside the pass."""


def pass_cost_tokens(weight_bytes: int, bytes_per_token: int) -> float:
    """A forward pass's price: so many tokens of one row's cache are read in the same time.
    Infinite where a cache does not grow with its tokens, or only up to a window."""
    if bytes_per_token <= 0:
        return float("inf")
    launch = METAL_LAUNCH_BYTES if mx.metal.is_available() else 0
    launch = CUDA_LAUNCH_BYTES if mx.cuda.is_available() else launch
    return (weight_bytes + launch) / bytes_per_token


def cheapest_batch(lanes: Sequence[Sequence[int]], joining: Sequence[int], price: float) -> int:
    """The lane that rows should join; ``len(lanes)`` stands for a new one.

    Args:
        lanes: the lengths of the rows in each.
        joining: those of the rows that join. They stay together.
        price: what a forward pass costs, see :func:`pass_cost_tokens`.
    """
    if not lanes:
        return 0

    def grown(lane: Sequence[int]) -> int:
        """The tokens that it reads more at each step than before."""
        rows = [*lane, *joining]
        return len(rows) * max(rows) - len(lane) * max(lane)

    # Of equals the larger one: the smaller will run empty, and with it a forward pass goes.
    best = min(range(len(lanes)), key=lambda i: (grown(lanes[i]), -len(lanes[i])))
    alone = len(joining) * max(joining) + price
    return len(lanes) if len(lanes) < MOST and alone < grown(lanes[best]) else best


class SubBatches:
    """As a :class:`~.decode.DecodeBatch`, but for the step: that is one of each of ``batches``."""

    def __init__(self, model: Any, width: int, price: float) -> None:
        self._model = model
        self._width = width
        self._price = price
        self.batches: list[DecodeBatch] = []

    def __len__(self) -> int:
        return sum(map(len, self.batches))

    @property
    def rows(self) -> list[SequenceState]:
        return list(chain.from_iterable(batch.rows for batch in self.batches))

    def join(self, rows: Sequence[SequenceState], cache: Cache) -> None:
        """Adds rows with their batched cache, which holds all but the last of their tokens."""
        lengths = [[len(row.tokens) for row in batch.rows] for batch in self.batches]
        lane = cheapest_batch(lengths, [len(row.tokens) for row in rows], self._price)
        if lane == len(self.batches):
            self.batches.append(DecodeBatch(self._model, self._width))
        self.batches[lane].join(rows, cache)

    def remove(self, rows: Sequence[int]) -> None:
        """Takes out rows by index."""
        gone = set(rows)
        start = 0
        for batch in self.batches:
            size = len(batch)
            if own := [i for i in range(size) if start + i in gone]:
                batch.remove(own)
            start += size
        self.batches = [batch for batch in self.batches if len(batch)]

    def take(self, row: int) -> tuple[list[int], Cache]:
        """The tokens in a row's cache, and a copy of it (lazy arrays)."""
        for batch in self.batches:
            if row < len(batch):
                return batch.take(row)
            row -= len(batch)
        raise IndexError("there is no such row")
