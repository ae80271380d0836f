"""One batched sampler for all sequences that decode.

A token is sampled by the Gumbel-max trick: the argmax of ``logits / temperature`` plus Gumbel noise
(Gumbel 1954; see Huijben et al., "A review of the Gumbel-max trick", 2022), which is a draw from
the softmax. Where the logits of a resumed or batched run differ in their last bits, the argmax
almost never differs, while an inverse-CDF draw often would differ.

The order of operations on a row's logits is

    model -> penalties -> bias -> banned ids -> grammar -> / temperature -> filters -> + noise

and no row's result depends on another row: an operation that is off for a row is either not
computed for it or is exactly the identity. Filters follow the common order: top-k, then top-p over
the remaining tokens, and min-p relative to the most likely token; all three become one threshold
that needs a single sort, and tokens tied with the threshold are kept.

The noise of a token is keyed by (seed, choice, position) alone: the same request samples the same
tokens alone, in any batch, and when another worker continues it after a fault. The 64-bit keys are
the outputs of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014), a generator whose n-th output can be computed directly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mayfly_protocol.requests import Sampling

_STEP = 0x9E3779B97F4A7C15
_GOLDEN = np.uint64(_STEP)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1


def _finalize(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


def stream_of(seed: int, choice: int) -> int:
    """Returns the 64-bit random state of one choice of a request, from which the random keys of all
    its tokens are derived."""
    start = (seed + choice * _STEP) & _MASK
    return int(_finalize(np.array([start], dtype=np.uint64))[0])


def keys_at(streams: NDArray[np.uint64], positions: Sequence[int]) -> NDArray[np.uint32]:
    """Returns an MLX random key for each row, shape [rows, 2]: the key of the token at the row's
    position in its answer, from the random state of the row's choice in ``streams`` (see
    :func:`stream_of`)."""
    counters = np.asarray(positions, dtype=np.uint64) + np.uint64(1)
    return _finalize(streams + counters * _GOLDEN).view(np.uint32).reshape(-1, 2)


_NEVER = -math.inf
_LEAST = 1e-30
"""Smallest value of ``top_p`` that is used, above zero in float32: a smaller one is raised to this
value, so that the likeliest token is always kept."""


@dataclass(frozen=True, slots=True)
class SequenceSampling:
    """Sampling parameters of one sequence.

    ``choice`` is the sequence's index among the choices of its request, and gives each choice
    random numbers of its own. ``banned`` are the ids of end tokens: they cannot be sampled before
    position ``banned_until`` of the answer, which is the request's ``min_tokens``.
    """

    sampling: Sampling
    choice: int = 0
    banned: tuple[int, ...] = ()
    banned_until: int = 0

    @classmethod
    def greedy(cls) -> SequenceSampling:
        return cls(Sampling(seed=0, temperature=0.0))

    @property
    def penalised(self) -> bool:
        s = self.sampling
        return (
            s.repetition_penalty != 1.0 or s.presence_penalty != 0.0 or s.frequency_penalty != 0.0
        )

    @property
    def filtered(self) -> bool:
        s = self.sampling
        return s.temperature > 0 and (s.top_p < 1.0 or s.top_k > 0 or s.min_p > 0.0)


class Sampler:
    """Samples one token for each row of a batch. A new sampler is built whenever rows join or leave
    the batch.

    A sampler counts how often each row with penalties has emitted each token. The next sampler is
    given these ``counts``, an array of shape [width] for each row (see :meth:`counts_of`);
    ``width`` is the length of a row of logits.
    """

    def __init__(
        self,
        rows: Sequence[SequenceSampling],
        width: int,
        counts: Sequence[mx.array | None] | None = None,
    ) -> None:
        self._rows = rows
        self._width = width
        self._streams = np.array(
            [stream_of(r.sampling.seed, r.choice) for r in rows], dtype=np.uint64
        )
        temperatures = [r.sampling.temperature for r in rows]
        self._all_greedy = all(t == 0 for t in temperatures)
        self._all_sampled = all(t > 0 for t in temperatures)
        self._is_sampled = mx.array([[t > 0] for t in temperatures])
        self._scale = mx.array([[t if t > 0 else 1.0 for t in temperatures]]).T

        self._penalised = [i for i, r in enumerate(rows) if r.penalised]
        if self._penalised:
            self._build_penalties(counts or [None] * len(rows))
        self._filtered = [i for i, r in enumerate(rows) if r.filtered]
        if self._filtered:
            self._build_filters()
        self._build_bias()
        self._banning = [i for i, r in enumerate(rows) if r.banned and r.banned_until > 0]
        touched = self._penalised or self._bias is not None or self._banning
        self._plain_argmax = self._all_greedy and not touched

    def _build_penalties(self, counts: Sequence[mx.array | None]) -> None:
        chosen = [self._rows[i].sampling for i in self._penalised]
        self._penalised_index = mx.array(self._penalised)
        self._repetition = mx.array([[s.repetition_penalty] for s in chosen])
        self._presence = mx.array([[s.presence_penalty] for s in chosen])
        self._frequency = mx.array([[s.frequency_penalty] for s in chosen])
        none = mx.zeros((self._width,))
        self._counts = mx.stack([none if (c := counts[i]) is None else c for i in self._penalised])

    def _build_filters(self) -> None:
        """Prepares the filters (top-k, top-p, min-p) that any row uses, with neutral values for
        rows that do not use them."""
        chosen = [self._rows[i].sampling for i in self._filtered]
        all_rows = len(chosen) == len(self._rows)
        self._filtered_index = None if all_rows else mx.array(self._filtered)
        self._kth = self._top_p = self._log_min_p = None
        if any(s.top_k for s in chosen):
            kept = (min(s.top_k, self._width) or self._width for s in chosen)
            self._kth = mx.array([[self._width - k] for k in kept])
        if any(s.top_p < 1.0 for s in chosen):
            # Without top-p infinity, as rounding may bring the sum of probabilities to 1; with
            # top-p more than 0, so that the likeliest token always stays.
            share = (max(s.top_p, _LEAST) if s.top_p < 1.0 else math.inf for s in chosen)
            self._top_p = mx.array([[p] for p in share])
        if any(s.min_p for s in chosen):
            self._log_min_p = mx.array([[math.log(s.min_p) if s.min_p else _NEVER] for s in chosen])

    def _build_bias(self) -> None:
        triples = [(i, t, b) for i, r in enumerate(self._rows) for t, b in r.sampling.logit_bias]
        self._bias = (
            tuple(mx.array(list(column)) for column in zip(*triples, strict=True))
            if triples
            else None
        )

    def counts_of(self, row: int) -> mx.array | None:
        """Returns how often a row has emitted each token, shape [width]; None if the row has no
        penalties."""
        return self._counts[self._penalised.index(row)] if row in self._penalised else None

    def __call__(
        self, logits: mx.array, positions: Sequence[int], allowed: mx.array | None = None
    ) -> mx.array:
        """Samples token ids, shape [rows], from logits of shape [rows, width].

        ``positions`` are the tokens' places in their answers, from 0; ``allowed`` is a boolean
        mask, shape [rows, width], of the ids that grammars permit.
        """
        if self._plain_argmax and allowed is None:
            return mx.argmax(
                logits, axis=-1
            )  # in the model's own type, whose order float32 would keep
        logits = logits.astype(mx.float32)
        if self._penalised:
            logits = self._penalise(logits)
        if self._bias is not None:
            rows, ids, bias = self._bias
            logits = logits.at[rows, ids].add(bias)
        logits = self._ban(logits, positions)
        if allowed is not None:
            logits = mx.where(allowed, logits, _NEVER)
        tokens = mx.argmax(
            logits if self._all_greedy else self._add_noise(logits, positions), axis=-1
        )
        if self._penalised:
            sampled = tokens[self._penalised_index]
            self._counts = self._counts.at[mx.arange(len(self._penalised)), sampled].add(1.0)
        return tokens

    def _penalise(self, logits: mx.array) -> mx.array:
        index, counts = self._penalised_index, self._counts
        x = logits[index]
        seen = counts > 0
        x = mx.where(seen, mx.where(x > 0, x / self._repetition, x * self._repetition), x)
        x = x - self._frequency * counts - self._presence * seen
        logits[index] = x
        return logits

    def _ban(self, logits: mx.array, positions: Sequence[int]) -> mx.array:
        pairs = [
            (i, token)
            for i in self._banning
            if positions[i] < self._rows[i].banned_until
            for token in self._rows[i].banned
        ]
        if not pairs:
            return logits
        rows, ids = zip(*pairs, strict=True)
        logits[mx.array(rows), mx.array(ids)] = _NEVER
        return logits

    def _add_noise(self, logits: mx.array, positions: Sequence[int]) -> mx.array:
        keys = mx.array(keys_at(self._streams, positions))
        scaled = logits / self._scale
        if self._filtered:
            scaled = self._filter(scaled)
        noisy = scaled + _gumbel(keys, self._width)
        return noisy if self._all_sampled else mx.where(self._is_sampled, noisy, logits)

    def _filter(self, scaled: mx.array) -> mx.array:
        index = self._filtered_index
        if index is None:
            return self._keep(scaled)
        scaled[index] = self._keep(scaled[index])
        return scaled

    def _keep(self, x: mx.array) -> mx.array:
        """Sets the logits that a row's filters (top-k, top-p, min-p) exclude to -inf.

        The filters are written with few operations: on a GPU each costs more time on the host than
        on the device.
        """
        ascending = mx.sort(x, axis=-1)
        least: list[mx.array] = []
        if self._log_min_p is not None:
            least.append(ascending[:, -1:] + self._log_min_p)
        if self._kth is not None:
            kth = mx.take_along_axis(ascending, self._kth, axis=-1)
            least.append(kth)
            ascending = mx.where(ascending >= kth, ascending, _NEVER)
        if self._top_p is not None:
            probabilities = mx.softmax(ascending, axis=-1)
            likelier = mx.cumsum(probabilities, axis=-1, reverse=True, inclusive=False)
            nucleus = mx.where(likelier < self._top_p, ascending, math.inf)
            least.append(mx.min(nucleus, axis=-1, keepdims=True))
        return mx.where(x >= reduce(mx.maximum, least), x, _NEVER)


def _gumbel(keys: mx.array, width: int) -> mx.array:
    """Returns Gumbel noise, shape [rows, width]; the noise of a row depends on the row's key
    alone."""
    return mx.vmap(lambda key: mx.random.gumbel((width,), key=key))(keys)


def healthy(logits: mx.array) -> mx.array:
    """Returns a boolean for each row, shape [rows]: False if the row's logits contain NaN or are
    all equal, as they are after a kernel that silently did nothing."""
    return mx.max(logits, axis=-1) > mx.min(logits, axis=-1)  # NaN is greater than nothing
