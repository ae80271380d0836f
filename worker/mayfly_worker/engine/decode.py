"""Decoding: a batch of sequences that generate one token a step.

The host stays one step behind the device: :meth:`DecodeBatch.step` launches the forward pass on
tokens that the host has not seen yet and then reads those tokens, so that the device always has
work. A sequence that turns out to have ended has therefore run one step too many, whose result is
dropped.

If a sequence follows a grammar, its next token needs a mask that depends on the token before. The
forward pass is launched first all the same; then the last token is read, the mask made, and
sampling launched after them.

Log-probabilities of sampled tokens are computed only for the rows that asked for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np

from mayfly_worker.engine import caches
from mayfly_worker.engine.caches import Cache
from mayfly_worker.engine.logprobs import PendingLogprobs, step_logprobs
from mayfly_worker.engine.sampler import RowMemory, Sampler, healthy
from mayfly_worker.engine.sequence import SampledToken, SequenceState
from mayfly_worker.prefix_cache.layers import arrays
from mayfly_worker.request_errors import GrammarFailed

EVALUATE_STEPS = 32
"""Number of decode steps after which every array of the batch's cache is evaluated. A step computes
only those that its logits depend on: of a layer without position embeddings it never computes the
offsets, of a recurrent layer hardly ever the padding, so that their unevaluated graphs would grow
by about 1.6 kB for each such layer and step as long as the batch is busy."""


class NonFiniteLogits(RuntimeError):
    """The logits of some rows contain NaN or are all equal: the device's results cannot be trusted.
    ``rows`` are the ids of these rows' sequences."""

    def __init__(self, rows: list[int]) -> None:
        super().__init__(f"the logits of {len(rows)} row(s) are not finite, or all equal")
        self.rows = rows


class DecodeBatch:
    """A batch of decoding sequences; ``rows[i]`` is the sequence in row i of every array and
    cache."""

    def __init__(self, model: Any, width: int) -> None:
        self._model = model
        self._width = width
        self._ids = mx.arange(width)
        self.rows: list[SequenceState] = []
        self._cache: Cache = []
        self._inputs: mx.array | None = None  # [rows] tokens to feed next
        self._healthy: mx.array | None = None
        self._logprobs: PendingLogprobs | None = None
        self._fresh = 0  # rows at the end whose input is a prompt's last token, not a sampled one
        self._sampler = Sampler([], width)
        self._steps = 0
        self.failed: dict[int, str] = {}
        """Error texts, by sequence id, of sequences whose grammar failed; the caller removes these
        sequences."""

    def __len__(self) -> int:
        return len(self.rows)

    def join(self, rows: Sequence[SequenceState], cache: Cache) -> None:
        """Adds sequences to the batch; ``cache`` is their batched KV cache, which holds all tokens
        of each sequence but the last."""
        last = mx.array([r.tokens[-1] for r in rows], dtype=mx.uint32)
        self._cache = caches.extend(self._cache, cache)
        self._inputs = last if self._inputs is None else mx.concatenate([self._inputs, last])
        memories = [self._sampler.memory_of(i) for i in range(len(self.rows))]
        self.rows = [*self.rows, *rows]
        self._fresh += len(rows)
        self._rebuild(
            memories + [RowMemory.of(r.sampling, r.tokens, r.generated, self._width) for r in rows]
        )

    def remove(self, rows: Sequence[int]) -> None:
        """Removes sequences from the batch by row index."""
        stay = [i for i in range(len(self.rows)) if i not in set(rows)]
        known = len(self.rows) - self._fresh
        stay_known = [i for i in stay if i < known]
        self._cache = caches.keep(self._cache, stay, [self._held(i) for i in stay])
        self._inputs = _select(self._inputs, stay)
        self._healthy = _select(self._healthy, stay_known)
        # Log-probabilities are read by sequence id: those of removed rows are never read.
        self._fresh = len(stay) - len(stay_known)
        memories = [self._sampler.memory_of(i) for i in stay]
        self.rows = [self.rows[i] for i in stay]
        self._rebuild(memories)

    def has_states_like(self, cache: Cache) -> bool:
        """True if the recurrent states of this batch have the shapes of those of ``cache``, but for
        the number of rows."""
        return caches.state_shapes(self._cache) == caches.state_shapes(cache)

    def take(self, row: int) -> tuple[list[int], Cache]:
        """Returns the tokens that a row's KV cache holds, and a copy of that cache (lazy
        arrays)."""
        held = self._held(row)
        return self.rows[row].tokens[:held], caches.take(self._cache, row, held)

    def _held(self, row: int) -> int:
        """Number of a row's tokens that are in its KV cache: all of them, or all but the last if
        the row has joined the batch since the last step."""
        return len(self.rows[row].tokens) - (row >= len(self.rows) - self._fresh)

    def step(self) -> list[SampledToken]:
        """Launches the next decode step and returns the tokens of the step before.

        A sequence that has just joined the batch has no token to return yet.

        Raises:
            NonFiniteLogits: the tokens to return were sampled from invalid logits.
        """
        assert self._inputs is not None
        inputs, fresh = self._inputs, self._fresh
        pending = (inputs, self._healthy, self._logprobs)
        known = len(self.rows) - fresh

        logits = self._model(inputs[:, None], cache=self._cache)[:, -1, :]
        guided = any(r.matcher is not None for r in self.rows)
        if guided:
            mx.async_eval(logits)
            sampled = self._read(known, *pending)
            self._launch(logits, self._masks())
        else:
            self._launch(logits, None)
            sampled = self._read(known, *pending)
        self._fresh = 0
        return sampled

    def settle(self) -> None:
        """Waits for the step that was launched last, so that an error of it is raised here."""
        assert self._inputs is not None
        mx.eval(self._inputs, [self._healthy] if self._healthy is not None else [])

    def _launch(self, logits: mx.array, allowed: mx.array | None) -> None:
        positions = [r.generated for r in self.rows]
        # Rows that are read after this launch have one token more than the host has counted yet.
        if allowed is None:
            known = len(self.rows) - self._fresh
            positions[:known] = [p + 1 for p in positions[:known]]
        tokens = self._sampler(logits, positions, allowed)
        self._healthy = healthy(logits)
        self._logprobs = step_logprobs(self.rows, logits, tokens)
        self._inputs = tokens
        self._steps += 1
        state = arrays(self._cache) if self._steps % EVALUATE_STEPS == 0 else []
        mx.async_eval(tokens, self._healthy, self._logprobs.arrays if self._logprobs else [], state)

    def _read(
        self,
        known: int,
        inputs: mx.array,
        was_healthy: mx.array | None,
        pending: PendingLogprobs | None,
    ) -> list[SampledToken]:
        tokens: list[Any] = inputs.tolist()  # type: ignore[assignment]
        finite: list[Any] = was_healthy.tolist() if was_healthy is not None else []  # type: ignore[assignment]
        if not all(finite):
            raise NonFiniteLogits([self.rows[i].id for i, ok in enumerate(finite) if not ok])
        values = pending.read() if pending else {}
        sampled = []
        for row, token in zip(self.rows[:known], tokens, strict=False):
            row.tokens.append(token)
            row.generated += 1
            if row.matcher is not None and token not in row.stop_ids:
                with self._failing_alone(row):
                    row.matcher.consume(token)
            end = self._end(row, token)
            sampled.append(SampledToken(row.id, token, end, values.get(row.id)))
        return sampled

    @staticmethod
    def _end(row: SequenceState, token: int) -> Any:
        if token in row.stop_ids:
            return "stop"
        return "length" if row.generated >= row.max_tokens else None

    def _masks(self) -> mx.array:
        """Boolean mask of the token ids that each row's grammar allows next, shape [rows,
        width]."""
        words = np.full((len(self.rows), (self._width + 31) // 32), -1, dtype=np.int32)
        for i, row in enumerate(self.rows):
            if row.matcher is not None and row.generated < row.max_tokens:
                with self._failing_alone(row):
                    row.matcher.fill(words[i])
        bits = mx.array(words.view(np.uint32))[:, self._ids >> 5]
        return ((bits >> (self._ids & 31).astype(mx.uint32)) & 1).astype(mx.bool_)

    @contextmanager
    def _failing_alone(self, row: SequenceState) -> Iterator[None]:
        """Context in which an error of a sequence's grammar is recorded in ``failed`` and fails
        that sequence alone."""
        try:
            yield
        except GrammarFailed as error:
            self.failed.setdefault(row.id, str(error))

    def _rebuild(self, memories: list[RowMemory]) -> None:
        self._sampler = Sampler([r.sampling for r in self.rows], self._width, memories)


def _select(values: mx.array | None, rows: list[int]) -> mx.array | None:
    return values[mx.array(rows)] if values is not None and rows else None
