"""Handling of mlx-lm's per-layer caches as one thing.

A *cache* here is a list with one mlx-lm cache object a layer. Caches of single sequences are merged
into caches of a batch, batches are extended, filtered and taken apart again. The shapes are
mlx-lm's own: the batched classes left-pad shorter rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, make_prompt_cache

Cache = list[Any]


Factory = Callable[[], Cache]
"""Makes an empty cache for one sequence."""


def factory(model: Any, max_kv_size: int | None = None, kv_bits: int | None = None) -> Factory:
    """How empty caches of this model are made. ``max_kv_size`` bounds them to a sliding window
    (for models that do not make their own), ``kv_bits`` quantizes keys and values."""

    def fresh() -> Cache:
        cache: Cache = make_prompt_cache(model, max_kv_size)
        if kv_bits is None:
            return cache
        return [
            layer.to_quantized(bits=kv_bits) if isinstance(layer, KVCache) else layer
            for layer in cache
        ]

    return fresh


def merge(caches: Sequence[Cache]) -> Cache:
    """One batch out of single sequences. A single sequence of a kind that cannot be batched is
    its own batch; several of them are a TypeError."""
    layers = list(zip(*caches, strict=True))
    if len(caches) == 1 and not all(hasattr(layer[0], "merge") for layer in layers):
        return list(caches[0])
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
        if hasattr(layer, "filter"):
            layer.filter(list(rows))
    return cache


def take(cache: Cache, row: int) -> Cache:
    """A copy of one row as a cache of its own. The arrays are lazy."""
    return [
        layer.extract(row) if hasattr(layer, "extract") else copy.deepcopy(layer) for layer in cache
    ]


def arrays(cache: Cache) -> list[Any]:
    """Everything that has to be evaluated for the cache to be there."""
    return [layer.state for layer in cache]


def evaluate(cache: Cache) -> None:
    mx.eval(arrays(cache))
