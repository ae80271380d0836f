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
from mlx_lm.models.cache import (
    BatchKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

Cache = list[Any]


Factory = Callable[[], Cache]
"""Makes an empty cache for one sequence."""


def factory(model: Any, max_kv_size: int | None = None, kv_bits: int | None = None) -> Factory:
    """How empty caches of this model are made. ``max_kv_size`` bounds them to a sliding window
    (for models that :func:`can_be_bounded`), ``kv_bits`` quantizes keys and values.

    The window is a plain one. mlx-lm's own bounded cache also keeps a sequence's first tokens, but
    only while the sequence is no part of a batch, and answers would depend on who else is there.
    """

    def fresh() -> Cache:
        if max_kv_size is not None:
            return [RotatingKVCache(max_kv_size) for _ in model.layers]
        cache: Cache = make_prompt_cache(model)
        if kv_bits is None:
            return cache
        return [
            layer.to_quantized(bits=kv_bits) if isinstance(layer, KVCache) else layer
            for layer in cache
        ]

    return fresh


def can_be_bounded(model: Any) -> bool:
    """Whether a sliding window may stand for this model's own caches: where each of those is a
    plain one that grows with every token.

    mlx-lm's ``make_prompt_cache`` is stricter, and leaves the bound out for every model that makes
    its own cache. Llama does, for the sake of variants with sliding layers, and otherwise returns
    plain ones.
    """
    return all(type(layer) is KVCache for layer in make_prompt_cache(model))


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


def widen(cache: Cache, length: int) -> None:
    """Pads a batch on the left to ``length`` columns. Only kinds that grow with every token have
    columns; of others nothing changes."""
    for layer in cache:
        if type(layer) is BatchKVCache and layer.keys is not None and layer._idx < length:
            extra = length - layer._idx
            sides = [(0, 0), (0, 0), (extra, 0), (0, 0)]
            layer.keys = mx.pad(layer.keys[..., : layer._idx, :], sides)
            layer.values = mx.pad(layer.values[..., : layer._idx, :], sides)
            layer.left_padding = layer.left_padding + extra
            layer._idx = length


def tighten(cache: Cache, longest: int) -> None:
    """Drops the columns on the left that no row uses: ``longest`` is what the longest holds."""
    for layer in cache:
        if type(layer) is BatchKVCache and layer.keys is not None and layer._idx > longest:
            shift = layer._idx - longest
            layer.keys = layer.keys[..., shift:, :]
            layer.values = layer.values[..., shift:, :]
            layer.left_padding = layer.left_padding - shift
            layer._idx = longest


def columns(cache: Cache) -> int:
    """How many tokens a row of a batch has room for, padding included; 0 for kinds of cache that
    do not grow with every token."""
    return next((layer._idx for layer in cache if type(layer) is BatchKVCache), 0)


def extend(into: Cache, other: Cache) -> Cache:
    """The rows of both batches in one, those of ``into`` first."""
    if not into or not other:
        return into or other
    for a, b in zip(into, other, strict=True):
        a.extend(b)
    return into


def keep(cache: Cache, rows: Sequence[int], lengths: Sequence[int]) -> Cache:
    """The batch reduced to the given rows, in that order. ``lengths`` are the tokens that each of
    them holds.

    mlx-lm's own ``filter`` reads the padding back from the device, which waits for all the work
    that is queued there. The host knows it: it is what a row's length leaves of the batch's.
    """
    if not rows:
        return []
    index = mx.array(list(rows))
    for layer in cache:
        if type(layer) is BatchKVCache and layer.keys is not None:
            _filter(layer, index)
        elif hasattr(layer, "filter"):
            layer.filter(list(rows))
    tighten(cache, max(lengths))
    return cache


def _filter(layer: BatchKVCache, index: mx.array) -> None:
    layer.keys = layer.keys[index]
    layer.values = layer.values[index]
    layer.offset = layer.offset[index]
    layer.left_padding = layer.left_padding[index]


def take(cache: Cache, row: int, length: int) -> Cache:
    """A copy of one row, which holds ``length`` tokens, as a cache of its own. The arrays are
    lazy; as in :func:`keep`, nothing waits for the device."""
    return [_take(layer, row, length) for layer in cache]


def _take(layer: Any, row: int, length: int) -> Any:
    if type(layer) is BatchKVCache:
        own = KVCache()
        if layer.keys is not None and length:
            begin, end = layer._idx - length, layer._idx
            own.keys = mx.contiguous(layer.keys[row : row + 1, :, begin:end])
            own.values = mx.contiguous(layer.values[row : row + 1, :, begin:end])
            own.offset = length
        return own
    return layer.extract(row) if hasattr(layer, "extract") else copy.deepcopy(layer)


def trimmable(cache: Cache) -> bool:
    """Whether a cache of this kind can be cut back to any length, however long it grew."""
    return all(type(layer) in (KVCache, QuantizedKVCache) for layer in cache)


def quantized(cache: Cache) -> bool:
    """Whether any of its layers keeps keys and values in fewer bits."""
    return any(isinstance(layer, QuantizedKVCache) for layer in cache)


def arrays(cache: Cache) -> list[Any]:
    """Everything that has to be evaluated for the cache to be there."""
    return [layer.state for layer in cache]


def evaluate(cache: Cache) -> None:
    mx.eval(arrays(cache))
