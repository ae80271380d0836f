"""Log-probabilities of drawn tokens, for the rows that asked and at no cost to the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mayfly_worker.engine.types import Logprobs, Row


@dataclass(frozen=True, slots=True)
class PendingLogprobs:
    """What a step left on the device: ``chosen`` [asking, 1], and the ids and log-probabilities
    of the ``most`` likely tokens [asking, most], in no order."""

    rows: list[tuple[int, int]]
    """Row id and alternatives asked for, for each that asked."""
    chosen: mx.array
    best: mx.array | None
    values: mx.array | None

    @property
    def arrays(self) -> list[mx.array]:
        return [a for a in (self.chosen, self.best, self.values) if a is not None]

    def read(self) -> dict[int, Logprobs]:
        """By row id; waits for the device."""
        chosen: list[Any] = self.chosen.tolist()  # type: ignore[assignment]
        best: Any = self.best.tolist() if self.best is not None else None
        values: Any = self.values.tolist() if self.values is not None else None
        found = {}
        for k, (row, asked) in enumerate(self.rows):
            pairs = sorted(zip(values[k], best[k], strict=True), reverse=True) if asked else []
            found[row] = Logprobs(
                chosen[k][0], [i for _, i in pairs[:asked]], [v for v, _ in pairs[:asked]]
            )
        return found


def of_step(rows: Sequence[Row], logits: mx.array, tokens: mx.array) -> PendingLogprobs | None:
    """The log-probabilities of ``tokens`` [rows] under ``logits`` [rows, width] as the model gave
    them, before penalties, masks and temperature. Lazy; None where nobody asked."""
    asking = [(i, r.id, r.logprobs) for i, r in enumerate(rows) if r.logprobs is not None]
    if not asking:
        return None
    index = mx.array([i for i, _, _ in asking])
    x = logits[index].astype(mx.float32)
    x = x - mx.logsumexp(x, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(x, tokens[index][:, None], axis=-1)
    most = max(asked for _, _, asked in asking)
    best = mx.argpartition(-x, kth=most - 1, axis=-1)[:, :most] if most else None
    values = mx.take_along_axis(x, best, axis=-1) if best is not None else None
    return PendingLogprobs([(row, asked) for _, row, asked in asking], chosen, best, values)
