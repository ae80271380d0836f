"""Handling of mlx-lm's per-layer caches as one thing.

A *cache* here is a list with one mlx-lm cache object a layer. Caches of single sequences are merged
into caches of a batch, batches are extended, filtered and taken apart again. The shapes are
mlx-lm's own: the batched classes left-pad shorter rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

Cache = list[Any]


def fresh(model: Any, max_kv_size: int | None = None) -> Cache:
    """An empty cache for one sequence."""
    cache: Cache = make_prompt_cache(model, max_kv_size)
    return cache


def merge(caches: Sequence[Cache]) -> Cache:
    """One batch out of single sequences. Raises TypeError for a kind that cannot be batched."""
    layers = list(zip(*caches, strict=True))
    for layer in layers:
        if not hasattr(layer[0], "merge"):
            raise TypeError(f"{type(layer[0]).__name__} cannot be batched")
    return [layer[0].merge(layer) for layer in layers]


def extend(into: Cache, other: Cache) -> Cache:
    """The rows of both batches in one, those of ``into`` first."""
    if not into or not other:
        return into or other
    for a, b in zip(into, other, strict=True):
        a.extend(b)
    return into


def keep(cache: Cache, rows: Sequence[int]) -> Cache:
    """The batch reduced to the given rows, in that order."""
    if not rows:
        return []
    for layer in cache:
        layer.filter(list(rows))
    return cache


def take(cache: Cache, row: int) -> Cache:
    """A copy of one row as a cache of its own. The arrays are lazy."""
    return [layer.extract(row) for layer in cache]


def arrays(cache: Cache) -> list[Any]:
    """Everything that has to be evaluated for the cache to be there."""
    return [layer.state for layer in cache]


def evaluate(cache: Cache) -> None:
    mx.eval(arrays(cache))


def batchable(model: Any) -> bool:
    """Whether rows of this model can share a batch at all."""
    return all(hasattr(layer, "merge") for layer in fresh(model))
