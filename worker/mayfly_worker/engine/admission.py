"""Which waiting request may start: pure arithmetic on rows and bytes.

Every row of a batch takes the longest row's length in the cache, so what counts is
``rows * longest``; and a join copies the batch, so there must be room for it twice at that moment.

How long an answer becomes nobody knows: to count on ``max_tokens``, which often is all that the
context leaves, would let few run where many would fit. So a row is admitted for its prompt and a
reserve. Where rows outgrow the budget all the same, the newest goes back to the head of the queue
with what it has generated, and goes on from there when there is room.

What MLX says of the device that it computes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mayfly_worker.engine.sequence import SequenceState


def free_memory() -> int | None:
    """Bytes that no process uses now of a device that has memory of its own. MLX asks the driver
    anew at each call. None on Metal and on a CPU, whose memory is the machine's."""
    free = mx.device_info().get("free_memory")
    return free if isinstance(free, int) else None


@dataclass(frozen=True, slots=True)
class Budget:
    """``kv_bytes`` of cache at most, ``max_rows`` rows; a token of one row costs
    ``bytes_per_token``, a row costs ``bytes_per_row`` whatever its length (state-space layers)."""

    max_rows: int
    kv_bytes: int
    bytes_per_token: int
    bytes_per_row: int = 0

    def need(self, rows: int, longest: int) -> int:
        """Bytes of a batch at its peak, with the copy that a join makes."""
        once = rows * (longest * self.bytes_per_token + self.bytes_per_row)
        return 2 * once if rows > 1 else once

    def admits(self, running: Sequence[SequenceState], joining: Sequence[SequenceState]) -> bool:
        """Whether ``joining`` may start beside what runs. A request always may start alone: what
        can never fit was refused before it was queued."""
        if not running:
            return True
        rows = [*running, *joining]
        if len(rows) > self.max_rows:
            return False
        return self.need(len(rows), max(r.expected for r in rows)) <= self.kv_bytes

    def holds(self, batches: Sequence[Sequence[SequenceState]]) -> bool:
        """Whether the rows that decode fit as long as they are now."""
        return self.taken(batches) <= self.kv_bytes

    def taken(self, batches: Sequence[Sequence[SequenceState]]) -> int:
        """Bytes of cache that rows take as long as they are now, in batches that have one each."""
        tokens = sum(len(rows) * max((len(r.tokens) for r in rows), default=0) for rows in batches)
        return tokens * self.bytes_per_token + sum(map(len, batches)) * self.bytes_per_row

    def rows_at(self, longest: int) -> int:
        """How many rows of so many tokens fit beside each other; 0 where not even one does."""
        if self.need(1, longest) > self.kv_bytes:
            return 0
        pair = self.need(2, longest)
        return max(1, min(self.max_rows, 2 * self.kv_bytes // pair if pair else self.max_rows))

    def longest_alone(self, rows: int = 1) -> int:
        """The most tokens (prompt and answer) that each of a request's rows can have."""
        if self.bytes_per_token <= 0:
            return 1 << 62
        share = self.kv_bytes // (2 * rows if rows > 1 else 1)
        return max(0, share - self.bytes_per_row) // self.bytes_per_token
