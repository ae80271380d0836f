"""The decode batch, split in two where some sequences are much longer than the others.

::

    one batch                              two
    short  ........................##      short  ##
    short  ........................##      short  ##
    long   ##########################      long   ##########################
           padding is read at each step           the weights are read twice

A batch pads every row to the length of its longest row, and each step reads the padding, too. A
second batch costs a second forward pass at each step. Both costs can be counted in tokens of one
row's KV cache, so new rows join the sub-batch to which they add the least cost.

Some models take a state of zeros for another than none, or keep a shorter one of the first few
tokens. Their sequences join only a sub-batch whose states have the same shapes, or a new one.

A suspect, a request that earlier workers may have failed on, has a sub-batch of its own.

From outside, the sub-batches look like one batch, whose rows are numbered through all of them.
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
"""Largest number of sub-batches of the decode batch into which lengths alone split it."""

METAL_LAUNCH_BYTES = 1 << 30
CUDA_LAUNCH_BYTES = 2 << 30
"""Bytes of padding that attention reads in the time that the host takes to launch a forward pass:
measured on an H200 (``bench/ragged.py``), where they are a tenth of what the memory could deliver
in that time; estimated for Metal. On a CPU the launch costs nothing beside the forward pass."""


def pass_cost_tokens(weight_bytes: int, bytes_per_token: int) -> float:
    """Returns the cost of a forward pass, as the number of tokens of one row's KV cache that can be
    read in the same time.

    The cost is infinite for a cache that does not grow with its tokens, or only up to a window.
    """
    if bytes_per_token <= 0:
        return float("inf")
    launch = METAL_LAUNCH_BYTES if mx.metal.is_available() else 0
    launch = CUDA_LAUNCH_BYTES if mx.cuda.is_available() else launch
    return (weight_bytes + launch) / bytes_per_token


def cheapest_batch(
    batches: Sequence[Sequence[int]], joining: Sequence[int], pass_cost: float
) -> int:
    """Returns the index of the batch that new rows should join, so that the decode steps of all
    batches cost the least; ``len(batches)`` means a new batch.

    Args:
        batches: lengths, in tokens, of the rows of each batch.
        joining: lengths, in tokens, of the new rows, which all join the same batch.
        pass_cost: cost of a forward pass, as the number of tokens of one row's KV cache that can be
            read in the same time.
    """
    if not batches:
        return 0

    def added(batch: Sequence[int]) -> int:
        """Returns how many more tokens of KV cache each step reads once the new rows have joined
        ``batch``."""
        rows = [*batch, *joining]
        return len(rows) * max(rows) - len(batch) * max(batch)

    # Of equal batches the larger: the smaller runs empty, which saves a forward pass.
    best = min(range(len(batches)), key=lambda i: (added(batches[i]), -len(batches[i])))
    alone = len(joining) * max(joining) + pass_cost
    return len(batches) if len(batches) < MOST and alone < added(batches[best]) else best


class SubBatches:
    """Decode batches with the interface of a single batch, except that the caller steps each of
    ``batches`` itself.

    With ``mixed_states`` false, sequences are in one of them only if their recurrent states have
    the same shapes.
    """

    def __init__(
        self, model: Any, width: int, pass_cost: float, *, mixed_states: bool = True
    ) -> None:
        self._model = model
        self._width = width
        self._pass_cost = pass_cost
        self._mixed_states = mixed_states
        self.batches: list[DecodeBatch] = []

    def __len__(self) -> int:
        return sum(map(len, self.batches))

    @property
    def rows(self) -> list[SequenceState]:
        return list(chain.from_iterable(batch.rows for batch in self.batches))

    def join(self, rows: Sequence[SequenceState], cache: Cache) -> None:
        """Adds sequences to the decode batch; ``cache`` is their batched KV cache, which holds all
        tokens of each sequence but the last."""
        alone = any(row.suspect for row in rows)
        open_to = [
            b
            for b in self.batches
            if not alone
            and not any(row.suspect for row in b.rows)
            and (self._mixed_states or b.has_states_like(cache))
        ]
        lengths = [[len(row.tokens) for row in batch.rows] for batch in open_to]
        index = cheapest_batch(lengths, [len(row.tokens) for row in rows], self._pass_cost)
        if index == len(open_to):
            open_to.append(DecodeBatch(self._model, self._width))
            self.batches.append(open_to[-1])
        open_to[index].join(rows, cache)

    def remove(self, rows: Sequence[int]) -> None:
        """Removes sequences by their row indices, which count through all sub-batches."""
        gone = set(rows)
        start = 0
        for batch in self.batches:
            size = len(batch)
            if own := [i for i in range(size) if start + i in gone]:
                batch.remove(own)
            start += size
        self.batches = [batch for batch in self.batches if len(batch)]

    def take(self, row: int) -> tuple[list[int], Cache]:
        """Returns the tokens that a row's KV cache holds, and a copy of that cache (lazy
        arrays)."""
        for batch in self.batches:
            if row < len(batch):
                return batch.take(row)
            row -= len(batch)
        raise IndexError(f"row {row} is not in any sub-batch")
