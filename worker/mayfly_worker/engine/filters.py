"""Filters of the sampler: they exclude tokens, before one of the others is drawn.

:mod:`mayfly_worker.engine.sampler` describes their order. Each leaves at least one token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mayfly_protocol.requests import Sampling

NEVER = -math.inf
"""Logit of a token that cannot be sampled."""
_LEAST = 1e-30
"""Smallest value of ``top_p`` and ``typical_p`` that is used, above zero in float32: a smaller one
is raised to this value, so that a token is always kept."""


class Filters:
    """Top-n-sigma, top-k, typical, top-p and min-p for the given rows of a batch of ``batch`` rows,
    with neutral values for rows that do not use one of them. ``width`` is the length of a row of
    logits.

    The filters are written with few operations: on a GPU each costs more time on the host than on
    the device.
    """

    def __init__(self, rows: Sequence[tuple[int, Sampling]], batch: int, width: int) -> None:
        chosen = [sampling for _, sampling in rows]
        self._index = None if len(rows) == batch else mx.array([row for row, _ in rows])
        self._kth = self._top_p = self._log_min_p = self._sigmas = self._typical = None
        if any(s.top_n_sigma > 0 for s in chosen):
            self._sigmas = mx.array(
                [[s.top_n_sigma if s.top_n_sigma > 0 else math.inf] for s in chosen]
            )
        if any(s.typical_p < 1.0 for s in chosen):
            self._typical = mx.array([[max(s.typical_p, _LEAST)] for s in chosen])
        if any(s.top_k for s in chosen):
            kept = (min(s.top_k, width) or width for s in chosen)
            self._kth = mx.array([[width - k] for k in kept])
        if any(s.top_p < 1.0 for s in chosen):
            # Without top-p infinity, as rounding may bring the sum of probabilities to 1; with
            # top-p more than 0, so that the likeliest token always stays.
            share = (max(s.top_p, _LEAST) if s.top_p < 1.0 else math.inf for s in chosen)
            self._top_p = mx.array([[p] for p in share])
        if any(s.min_p for s in chosen):
            self._log_min_p = mx.array([[math.log(s.min_p) if s.min_p else NEVER] for s in chosen])

    def __call__(self, scaled: mx.array) -> mx.array:
        """Sets the logits that are filtered out to -inf; ``scaled`` are the batch's logits, divided
        by the temperatures."""
        index = self._index
        if index is None:
            return self._keep(scaled)
        scaled[index] = self._keep(scaled[index])
        return scaled

    def _keep(self, x: mx.array) -> mx.array:
        """Sets the logits that a row's filters exclude to -inf."""
        least: list[mx.array] = []
        ascending = mx.sort(x, axis=-1)
        if self._sigmas is not None:
            bounds = ascending[:, -1:] - self._sigmas * _deviation(x)
            least.append(mx.where(self._sigmas < math.inf, bounds, NEVER))
        if self._kth is not None:
            least.append(mx.take_along_axis(ascending, self._kth, axis=-1))
        if least:
            bound = reduce(mx.maximum, least)
            ascending = mx.where(ascending >= bound, ascending, NEVER)
            if self._typical is not None:
                x = mx.where(x >= bound, x, NEVER)
        if self._typical is not None:
            x = _typical(x, self._typical)
            ascending = mx.sort(x, axis=-1)
        if self._log_min_p is not None:
            least.append(ascending[:, -1:] + self._log_min_p)
        if self._top_p is not None:
            probabilities = mx.softmax(ascending, axis=-1)
            likelier = mx.cumsum(probabilities, axis=-1, reverse=True, inclusive=False)
            nucleus = mx.where(likelier < self._top_p, ascending, math.inf)
            least.append(mx.min(nucleus, axis=-1, keepdims=True))
        return mx.where(x >= reduce(mx.maximum, least), x, NEVER) if least else x


class Xtc:
    """XTC ("exclude top choices") for some rows of a batch, each with the ids that it keeps."""

    def __init__(self, rows: Sequence[tuple[int, Sampling, tuple[int, ...]]], width: int) -> None:
        self._rows = np.array([row for row, _, _ in rows])
        self._probabilities = np.array([sampling.xtc_probability for _, sampling, _ in rows])
        self._thresholds = mx.array([[sampling.xtc_threshold] for _, sampling, _ in rows])
        self._temperatures = mx.array([[sampling.temperature] for _, sampling, _ in rows])
        kept = np.zeros((len(rows), width), dtype=np.bool_)
        for mask, (_, _, ids) in zip(kept, rows, strict=True):
            mask[list(ids)] = True
        self._kept = mx.array(kept)

    def __call__(self, scaled: mx.array, draws: NDArray[np.float64]) -> mx.array:
        """Sets the logits that XTC excludes to -inf, in rows whose draws, one for each row of the
        batch, are below their probability."""
        drawn = np.flatnonzero(draws[self._rows] < self._probabilities)
        if not len(drawn):
            return scaled
        index, own = mx.array(self._rows[drawn]), mx.array(drawn)
        x = scaled[index]
        probabilities = mx.softmax(x * self._temperatures[own], axis=-1)
        choices = mx.where(probabilities > self._thresholds[own], probabilities, math.inf)
        likelier = probabilities > mx.min(choices, axis=-1, keepdims=True)
        scaled[index] = mx.where(likelier & ~self._kept[own], NEVER, x)
        return scaled


def _deviation(x: mx.array) -> mx.array:
    """Standard deviation of each row's logits, shape [rows, 1], without those that are -inf."""
    some = x > NEVER
    count = mx.sum(some, axis=-1, keepdims=True)
    mean = mx.sum(mx.where(some, x, 0.0), axis=-1, keepdims=True) / count
    return mx.sqrt(mx.sum(mx.where(some, (x - mean) ** 2, 0.0), axis=-1, keepdims=True) / count)


def _typical(x: mx.array, share: mx.array) -> mx.array:
    """Keeps of each row the tokens whose surprise is nearest to the entropy, until their
    probabilities sum up to ``share``, shape [rows, 1]; sets the others to -inf. A share of 1 keeps
    all."""
    logs = x - mx.logsumexp(x, axis=-1, keepdims=True)
    probabilities = mx.exp(logs)
    entropy = -mx.sum(
        mx.where(probabilities > 0, probabilities * logs, 0.0), axis=-1, keepdims=True
    )
    distance = mx.abs(logs + entropy)
    order = mx.argsort(distance, axis=-1)
    nearer = mx.cumsum(mx.take_along_axis(probabilities, order, axis=-1), axis=-1, inclusive=False)
    farthest = mx.where(nearer < share, mx.take_along_axis(distance, order, axis=-1), NEVER)
    bound = mx.max(farthest, axis=-1, keepdims=True)
    return mx.where((distance <= bound) | (share >= 1.0), x, NEVER)
