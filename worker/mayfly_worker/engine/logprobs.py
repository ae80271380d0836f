"""Log-probabilities of tokens under the model's own distribution: before penalties, masks and
temperature.

Of sampled tokens they are computed only for the rows that asked for them, together with the step
that samples the tokens. Of a prompt's tokens they are computed while the prompt is prefilled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mayfly_worker.engine.sequence import Logprobs, SequenceState

SCORED_BYTES = 256 << 20
"""Largest size of a prefill chunk's logits, in 32-bit floats, if the prompt is scored: the logits
of every position are computed then, which for large vocabularies take more memory than all else."""


@dataclass(frozen=True, slots=True)
class PendingLogprobs:
    """Log-probabilities at some positions, still on the device.

    ``chosen``, shape [positions, 1], belongs to the tokens that stand there; ``best`` and
    ``values``, shape [positions, most], are ids and log-probabilities of the ``most`` likeliest
    tokens, unordered; both are None if no position asked for alternatives. ``ranks``, shape
    [positions], are the tokens' ranks, or None.
    """

    rows: list[tuple[int, int]]
    """A name of each position (in decoding, its sequence's id), and the number of alternatives that
    are wanted there."""
    chosen: mx.array
    best: mx.array | None
    values: mx.array | None
    ranks: mx.array | None = None

    @property
    def arrays(self) -> list[mx.array]:
        return [a for a in (self.chosen, self.best, self.values, self.ranks) if a is not None]

    def read(self) -> dict[int, Logprobs]:
        """Waits for the device and returns the log-probabilities by the names of the positions."""
        chosen: list[Any] = self.chosen.tolist()  # type: ignore[assignment]
        best: Any = self.best.tolist() if self.best is not None else None
        values: Any = self.values.tolist() if self.values is not None else None
        ranks: Any = self.ranks.tolist() if self.ranks is not None else None
        found = {}
        for k, (row, asked) in enumerate(self.rows):
            pairs = sorted(zip(values[k], best[k], strict=True), reverse=True) if asked else []
            found[row] = Logprobs(
                chosen[k][0],
                [i for _, i in pairs[:asked]],
                [v for v, _ in pairs[:asked]],
                ranks[k] if ranks is not None else None,
            )
        return found


def step_logprobs(
    rows: Sequence[SequenceState], logits: mx.array, tokens: mx.array
) -> PendingLogprobs | None:
    """Returns the log-probabilities of the sampled ``tokens``, shape [rows], under ``logits``,
    shape [rows, width]. The arrays are lazy; None if no row asked for log-probabilities."""
    asking = [(i, r.id, r.logprobs) for i, r in enumerate(rows) if r.logprobs is not None]
    if not asking:
        return None
    index = mx.array([i for i, _, _ in asking])
    return _logprobs([(row, asked) for _, row, asked in asking], logits[index], tokens[index])


def prompt_logprobs(logits: mx.array, tokens: Sequence[int], asked: int) -> list[Logprobs]:
    """Waits for the device and returns the log-probabilities of a prompt's next ``tokens``, one for
    each row of ``logits``, shape [tokens, width], with ``asked`` alternatives each."""
    rows = [(position, asked) for position in range(len(tokens))]
    found = _logprobs(rows, logits, mx.array(list(tokens)), ranked=True).read()
    return [found[position] for position, _ in rows]


def scored_chunk(width: int) -> int:
    """Returns the largest number of tokens, over all rows, in a prefill chunk of prompts that are
    scored, for logits of this ``width``."""
    return max(1, SCORED_BYTES // (4 * width))


def _logprobs(
    rows: list[tuple[int, int]], logits: mx.array, tokens: mx.array, *, ranked: bool = False
) -> PendingLogprobs:
    x = logits.astype(mx.float32)
    x = x - mx.logsumexp(x, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(x, tokens[:, None], axis=-1)
    most = max(asked for _, asked in rows)
    best = mx.argpartition(-x, kth=most - 1, axis=-1)[:, :most] if most else None
    values = mx.take_along_axis(x, best, axis=-1) if best is not None else None
    ranks = (x > chosen).sum(axis=-1) + 1 if ranked else None
    return PendingLogprobs(rows, chosen, best, values, ranks)
