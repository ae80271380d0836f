"""Copying and trimming of mlx-lm's per-layer caches (mlx_lm/models/cache.py).

    class                          can be trimmed            content
    KVCache, ConcatenateKVCache,   always                    keys[:offset]
      QuantizedKVCache
    ChunkedKVCache                 while it dropped nothing  keys[:offset - start_position]
    RotatingKVCache                until it wrapped          the last max_size keys, and ``keep``
    CacheList                      if all its parts can      content of its parts
    None                           has no state              none
    ArraysCache and any other      never                     all its arrays

A trimmed cache must equal the result of a prefill of the shorter prompt. mlx-lm's
``is_trimmable`` does not promise that for a ChunkedKVCache which has dropped its front, nor
for a ConcatenateKVCache, which appends after the keys that ``trim`` was to remove.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import (
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

LayerCache: TypeAlias = Any
"""KV cache of one layer for one sequence: an mlx-lm cache object (mlx-lm has no type for all of
them), or None."""

_POSITIONAL = (KVCache, ConcatenateKVCache, QuantizedKVCache, ChunkedKVCache, RotatingKVCache)


def trimmable(caches: Sequence[LayerCache]) -> bool:
    """True if these caches can be cut back to a shorter prefix of the tokens that they hold."""
    return all(_can_be_trimmed(layer) for layer in leaves(caches))


def arrays(caches: Sequence[LayerCache]) -> list[mx.array]:
    """Returns every array that these caches hold."""
    return [
        leaf
        for layer in leaves(caches)
        for leaf in dict(tree_flatten(vars(layer))).values()
        if isinstance(leaf, mx.array)
    ]


def detached(caches: Sequence[LayerCache]) -> list[LayerCache]:
    """Copies caches so that the copies share no buffer with the batch that the caches came from,
    and hold no room to grow.

    The copies are lazy: until their :func:`arrays` are evaluated they keep the originals alive.
    """
    own = copy.deepcopy(list(caches))
    for layer in leaves(own):
        _drop_slack(layer)
        for name, value in vars(layer).items():
            setattr(layer, name, tree_map(_contiguous, value))
    return own


def copied(caches: Sequence[LayerCache], length: int) -> list[LayerCache]:
    """Copies stored caches for one request, trimmed to the first ``length`` tokens.

    MLX copies a buffer only when the original or the copy writes to it. If ``length`` is less than
    the number of tokens that the caches hold, the caches must be :func:`trimmable`.
    """
    own = copy.deepcopy(list(caches))
    for layer in leaves(own):
        if isinstance(layer, _POSITIONAL) and layer.offset > length:
            layer.trim(layer.offset - length)
            _drop_slack(layer)
    return own


def check_length(caches: Sequence[LayerCache], length: int) -> None:
    """Raises ValueError if a layer's cache that knows its length holds more or fewer tokens than
    ``length``."""
    for index, cache in enumerate(caches):
        for layer in leaves([cache]):
            if isinstance(layer, _POSITIONAL) and not layer.empty() and layer.offset != length:
                raise ValueError(
                    f"the cache of layer {index} ({type(layer).__name__}) holds {layer.offset} "
                    f"tokens, not the {length} it was given for"
                )


def leaves(caches: Iterable[LayerCache]) -> Iterator[LayerCache]:
    """Yields the caches that hold arrays: each cache that is not None, and the parts of a CacheList
    one by one."""
    for layer in caches:
        if isinstance(layer, CacheList):
            yield from leaves(layer.caches)
        elif layer is not None:
            yield layer


def _can_be_trimmed(layer: LayerCache) -> bool:
    if isinstance(layer, ChunkedKVCache) and layer.start_position > 0:
        return False
    return isinstance(layer, _POSITIONAL) and layer.is_trimmable()


def _drop_slack(layer: LayerCache) -> None:
    """Cuts off the part of a cache beyond its content: room to grow, and tokens that were
    trimmed."""
    if not isinstance(layer, _POSITIONAL) or layer.empty():
        return
    if isinstance(layer, RotatingKVCache):
        # A prefill leaves up to a chunk more than the window.
        keys, values = layer._temporal_order(layer.keys), layer._temporal_order(layer.values)
        surplus = keys.shape[2] - layer.max_size
        layer.keys, layer.values = layer._trim(surplus, keys), layer._trim(surplus, values)
        layer._idx = layer.keys.shape[2]
        return
    end = layer.offset - getattr(layer, "start_position", 0)
    layer.keys, layer.values = tree_map(lambda x: x[..., :end, :], (layer.keys, layer.values))


def _contiguous(leaf: Any) -> Any:
    # A slice along the batch is contiguous already, and ``mx.contiguous`` copies it all the
    # same if it would keep a much larger buffer alive.
    return mx.contiguous(leaf) if isinstance(leaf, mx.array) else leaf
