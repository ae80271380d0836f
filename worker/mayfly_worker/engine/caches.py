"""Operations on the KV cache of a model: merge, extend, reduce, take, pad.

A *cache* is a list with one mlx-lm cache object for each layer. Caches of single sequences are
merged into the cache of a batch; caches of batches are extended, reduced and split again. Their
layout is mlx-lm's own: its batched classes pad shorter rows on the left.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from mayfly_worker.engine.bounded_caches import KEPT as KEPT
from mayfly_worker.engine.bounded_caches import BoundedKVCache, GroupedKVCache
from mayfly_worker.prefix_cache.layers import leaves

Cache = list[Any]
"""KV cache of one sequence or one batch: one mlx-lm cache object for each layer."""

Factory = Callable[[], Cache]
"""Function that makes an empty KV cache for one sequence."""


def factory(
    model: Any,
    max_kv_size: int | None = None,
    kv_bits: int | None = None,
    kv_group_size: int | None = None,
) -> Factory:
    """Returns a function that makes empty KV caches for this model.

    ``max_kv_size`` bounds each cache to the first tokens of a sequence and its last ones, that many
    in all (only for models that :func:`can_be_bounded` accepts). ``kv_bits`` quantizes the keys and
    values of layers that grow with every token, from the first token on, in groups of
    ``kv_group_size`` values (None: the largest that fits).
    """

    def replaced(layer: Any) -> Any:
        if type(layer) is not KVCache:
            return layer
        if max_kv_size is not None:
            return BoundedKVCache(max_kv_size)
        if kv_bits is not None:
            return GroupedKVCache(kv_bits, kv_group_size or 0)
        return layer

    return lambda: [replaced(layer) for layer in make_prompt_cache(model)]


def windowed(model: Any, window: int) -> Factory:
    """Returns a function that makes empty KV caches with which each token attends to the last
    ``window`` tokens, for a model whose own caches grow with every token."""
    return lambda: [RotatingKVCache(window) for _ in make_prompt_cache(model)]


def can_be_bounded(model: Any) -> bool:
    """True if bounded caches may replace this model's own KV caches: each of them is a plain cache
    that grows with every token.

    mlx-lm's ``make_prompt_cache`` is stricter and ignores the bound for every model that makes its
    own caches. Llama makes its own for variants with sliding layers, and otherwise returns plain
    caches.
    """
    return all(type(layer) is KVCache for layer in make_prompt_cache(model))


def merge(caches: Sequence[Cache]) -> Cache:
    """Merges the KV caches of single sequences into the cache of one batch.

    A single cache of a class that cannot be batched is returned as it is.

    Raises:
        TypeError: several caches of a class that cannot be batched.
    """
    layers = list(zip(*caches, strict=True))
    if len(caches) == 1 and not all(hasattr(layer[0], "merge") for layer in layers):
        return list(caches[0])
    for layer in layers:
        if not hasattr(layer[0], "merge"):
            raise TypeError(f"{type(layer[0]).__name__} cannot be batched")
    return [layer[0].merge(layer) for layer in layers]


def widen(cache: Cache, length: int) -> None:
    """Pads a batch's KV cache on the left, in place, to ``length`` columns; a column holds one
    token of each row.

    Only layers that grow with every token have columns; layers with a window or a recurrent state
    do not change.
    """
    for layer in cache:
        if type(layer) is BatchKVCache and layer.keys is not None and layer._idx < length:
            extra = length - layer._idx
            sides = [(0, 0), (0, 0), (extra, 0), (0, 0)]
            layer.keys = mx.pad(layer.keys[..., : layer._idx, :], sides)
            layer.values = mx.pad(layer.values[..., : layer._idx, :], sides)
            layer.left_padding = layer.left_padding + extra
            layer._idx = length


def tighten(cache: Cache, longest: int) -> None:
    """Drops the columns on the left of a batch's KV cache that only hold padding; ``longest`` is
    the number of tokens in the longest row."""
    for layer in cache:
        if type(layer) is BatchKVCache and layer.keys is not None and layer._idx > longest:
            shift = layer._idx - longest
            layer.keys = layer.keys[..., shift:, :]
            layer.values = layer.values[..., shift:, :]
            layer.left_padding = layer.left_padding - shift
            layer._idx = longest


def columns(cache: Cache) -> int:
    """Returns the number of columns of a batch's KV cache: tokens of each row, padding included. 0
    if no layer grows with every token."""
    return next((layer._idx for layer in cache if type(layer) is BatchKVCache), 0)


def extend(into: Cache, other: Cache) -> Cache:
    """Appends the rows of the batched KV cache ``other`` to ``into``, and returns the result."""
    if not into or not other:
        return into or other
    for a, b in zip(into, other, strict=True):
        a.extend(b)
    return into


def keep(cache: Cache, rows: Sequence[int], lengths: Sequence[int]) -> Cache:
    """Reduces a batch's KV cache to the given rows, in that order; ``lengths`` are the numbers of
    tokens that these rows hold.

    mlx-lm's own ``filter`` reads the padding back from the device, which waits for all work queued
    on the device. This function computes the padding on the host: the batch's columns less the
    row's length.
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
    """Copies the KV cache of one row, which holds ``length`` tokens, out of a batch.

    The copy's arrays are lazy: nothing waits for the device.
    """
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
    # A plain cache is that of the only row; a CacheList has the method whatever its parts are.
    if all(hasattr(part, "extract") for part in leaves([layer])):
        return layer.extract(row)
    return copy.deepcopy(layer)


def trimmable(cache: Cache) -> bool:
    """True if a KV cache of this type can be cut back to any length, however long it grew."""
    return all(type(layer) in (KVCache, GroupedKVCache) for layer in cache)


def quantized(cache: Cache) -> bool:
    """True if any layer of the KV cache stores quantized keys and values."""
    return any(isinstance(layer, QuantizedKVCache) for layer in cache)


def state_shapes(cache: Cache) -> list[tuple[int, ...] | None]:
    """Returns the shape of a row of each recurrent state, None for one that is not there yet."""
    states = [layer.cache for layer in leaves(cache) if isinstance(layer, ArraysCache)]
    return [None if array is None else array.shape[1:] for each in states for array in each]


def arrays(cache: Cache) -> list[Any]:
    """Returns the lazy arrays of a KV cache; once they are evaluated, the cache is computed."""
    return [layer.state for layer in cache]


def evaluate(cache: Cache) -> None:
    """Evaluates all arrays of a KV cache, and waits until they are computed."""
    mx.eval(arrays(cache))
