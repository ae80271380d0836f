"""Admission: the memory budget that decides which waiting request may start.

Every row of a batch takes the longest row's length in the KV cache, so a batch costs ``rows *
longest`` tokens; when rows join a batch, the batch is copied, so that there must be room for
both copies at that moment.

The length of an answer is not known in advance. To reserve ``max_tokens``, which often is all that
the context leaves, would let few requests run where many would fit. So a sequence is admitted for
its prompt and a fixed reserve for its answer. If running sequences exceed the budget all the same,
the newest sequence returns to the head of the queue with the tokens that it has generated, and
continues from there when there is room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mayfly_worker.engine.sequence import SequenceState


def free_memory() -> int | None:
    """Returns the free bytes of a device with memory of its own (CUDA); None on Metal and on a CPU.

    MLX asks the driver for the number at each call.
    """
    free = mx.device_info().get("free_memory")
    return free if isinstance(free, int) else None


@dataclass(frozen=True, slots=True)
class Budget:
    """Memory limits by which sequences are admitted: at most ``max_rows`` of them run at once, and
    their KV caches take at most ``kv_bytes``.

    Each token of a sequence costs ``bytes_per_token``; a sequence also costs ``bytes_per_row``
    whatever its length (state-space layers). Beside the caches, a forward pass may take
    ``pass_bytes``.
    """

    max_rows: int
    kv_bytes: int
    bytes_per_token: int
    bytes_per_row: int = 0
    pass_bytes: int = 1 << 62

    def need(self, rows: int, longest: int) -> int:
        """Returns the bytes of a batch of ``rows`` sequences at its peak, which is when sequences
        join the batch and it is copied."""
        once = rows * (longest * self.bytes_per_token + self.bytes_per_row)
        return 2 * once if rows > 1 else once

    def admits(self, running: Sequence[SequenceState], joining: Sequence[SequenceState]) -> bool:
        """True if the sequences ``joining`` may start beside the sequences ``running``.

        A request may always start alone: a request that can never fit was refused before it was
        queued.
        """
        if not running:
            return True
        rows = [*running, *joining]
        if len(rows) > self.max_rows:
            return False
        return self.need(len(rows), max(r.expected for r in rows)) <= self.kv_bytes

    def holds(self, batches: Sequence[Sequence[SequenceState]]) -> bool:
        """True if the decoding sequences of these batches fit into the budget at their present
        lengths."""
        return self.taken(batches) <= self.kv_bytes

    def taken(self, batches: Sequence[Sequence[SequenceState]]) -> int:
        """Returns the bytes of KV cache that the sequences of these batches take at their present
        lengths, padding to each batch's longest sequence included."""
        tokens = sum(len(rows) * max((len(r.tokens) for r in rows), default=0) for rows in batches)
        return tokens * self.bytes_per_token + sum(map(len, batches)) * self.bytes_per_row

    def rows_at(self, longest: int) -> int:
        """Returns the number of sequences of ``longest`` tokens that fit into the budget together;
        0 if not even one fits."""
        if self.need(1, longest) > self.kv_bytes:
            return 0
        pair = self.need(2, longest)
        return max(1, min(self.max_rows, 2 * self.kv_bytes // pair if pair else self.max_rows))

    def longest_alone(self, rows: int = 1) -> int:
        """Returns the largest length (prompt and answer, in tokens) that each of ``rows`` sequences
        may have if no others run."""
        if self.bytes_per_token <= 0:
            return 1 << 62
        share = self.kv_bytes // (2 * rows if rows > 1 else 1)
        return max(0, share - self.bytes_per_row) // self.bytes_per_token
