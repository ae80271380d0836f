"""Admission: the memory budget that decides which waiting request may start.

Every row of a batch takes the longest row's length in the cache, so a batch costs
``rows * longest``; a join copies the batch, so that there must be room for it twice at that moment.

The length of an answer is not known in advance. To reserve ``max_tokens``, which often is all that
the context leaves, would let few requests run where many would fit. So a sequence is admitted for
its prompt and a reserve. Where sequences exceed the budget all the same, the newest one returns to
the head of the queue with the tokens it has generated, and continues from there when there is room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mayfly_worker.engine.sequence import SequenceState


def free_memory() -> int | None:
    """Returns the free bytes of a device with memory of its own; None on Metal and on a CPU.

    MLX asks the driver anew at each call.
    """
    free = mx.device_info().get("free_memory")
    return free if isinstance(free, int) else None


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of the running sequences: ``max_rows`` of them and ``kv_bytes`` of cache.

    A token of one sequence costs ``bytes_per_token``, a sequence costs ``bytes_per_row`` whatever
    its length (state-space layers).
    """

    max_rows: int
    kv_bytes: int
    bytes_per_token: int
    bytes_per_row: int = 0

    def need(self, rows: int, longest: int) -> int:
        """Returns the bytes of a batch at its peak, with the copy that a join makes."""
        once = rows * (longest * self.bytes_per_token + self.bytes_per_row)
        return 2 * once if rows > 1 else once

    def admits(self, running: Sequence[SequenceState], joining: Sequence[SequenceState]) -> bool:
        """True if ``joining`` may start beside ``running``.

        A request may always start alone: one that can never fit was refused before it was queued.
        """
        if not running:
            return True
        rows = [*running, *joining]
        if len(rows) > self.max_rows:
            return False
        return self.need(len(rows), max(r.expected for r in rows)) <= self.kv_bytes

    def holds(self, batches: Sequence[Sequence[SequenceState]]) -> bool:
        """True if the decoding sequences fit at their present lengths."""
        return self.taken(batches) <= self.kv_bytes

    def taken(self, batches: Sequence[Sequence[SequenceState]]) -> int:
        """Returns the bytes of cache that sequences take at their present lengths, in their
        batches."""
        tokens = sum(len(rows) * max((len(r.tokens) for r in rows), default=0) for rows in batches)
        return tokens * self.bytes_per_token + sum(map(len, batches)) * self.bytes_per_row

    def rows_at(self, longest: int) -> int:
        """Returns the number of sequences of ``longest`` tokens that fit together; 0 if none
        fits."""
        if self.need(1, longest) > self.kv_bytes:
            return 0
        pair = self.need(2, longest)
        return max(1, min(self.max_rows, 2 * self.kv_bytes // pair if pair else self.max_rows))

    def longest_alone(self, rows: int = 1) -> int:
        """Returns the largest length (prompt and answer) of each of a request's ``rows``
        choices."""
        if self.bytes_per_token <= 0:
            return 1 << 62
        share = self.kv_bytes // (2 * rows if rows > 1 else 1)
        return max(0, share - self.bytes_per_row) // self.bytes_per_token
