"""Probe of a model before it serves: length of a row of logits, KV cost, batching and padding.

A few tokens are run through the model to learn these properties, because its code does not state
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mayfly_worker.engine import caches
from mayfly_worker.engine.prefill import PrefillGroup, Prompt
from mayfly_worker.engine.sampler import SequenceSampling
from mayfly_worker.engine.sequence import SequenceState
from mayfly_worker.model.reference_store import ReferenceStore
from mayfly_worker.prefix_cache.layers import leaves

_LONG = [7, 3, 11, 5, 2, 13, 4]
_SHORT = [9, 6, 8]
_TOLERANCE = 0.2
"""Largest difference, in standard deviations of the logits, that padding a prompt may make to the
prompt's logits in a model that honours the padding mask. Right padding was seen to move logits by
1e-5 in float32 where a model honours the mask, and by several standard deviations where a model
ignores it."""


@dataclass(frozen=True, slots=True)
class KVCost:
    """Bytes of a sequence's KV cache: ``per_token`` for each token (layers that grow), and
    ``per_row`` whatever the length (state-space layers, and layers with a window, which is counted
    whole)."""

    per_token: int
    per_row: int


@dataclass(frozen=True, slots=True)
class Probe:
    """Properties of a model that were found by running a few tokens through it.

    ``width`` is the length of a row of logits, which may exceed the tokenizer's vocabulary.
    ``batchable``: sequences may decode together. ``padding_safe``: prompts of different lengths may
    be prefilled together (some state-space models ignore the padding mask).
    """

    width: int
    cost: KVCost
    batchable: bool
    padding_safe: bool


def probe(model: Any, new_cache: caches.Factory, references: ReferenceStore) -> Probe:
    """Finds a model's properties by running a few tokens through it. The test of padding is left
    out if its result is in ``references``, the stored results of earlier workers."""
    cache = new_cache()
    logits = model(mx.array([_SHORT]), cache=cache)
    batchable = can_batch(cache)
    return Probe(
        width=logits.shape[-1],
        cost=_cost(cache),
        batchable=batchable,
        padding_safe=batchable and _padding_safe(model, new_cache, references),
    )


def can_batch(cache: caches.Cache) -> bool:
    """True if sequences with KV caches of this type may decode together."""
    return all(hasattr(layer, "merge") for layer in cache)


def kv_cost(model: Any, new_cache: caches.Factory) -> KVCost:
    """Returns the bytes of KV cache per token and per sequence, of a model whose weights are not
    loaded.

    A forward pass is built but not computed, which is enough to know each array's shape and type.
    """
    cache = new_cache()
    model(mx.array([_SHORT]), cache=cache)
    return _cost(cache)


def _cost(cache: caches.Cache) -> KVCost:
    per_token = per_row = 0
    for layer in leaves(cache):
        grows = getattr(layer, "keys", None) is not None
        window = getattr(layer, "max_size", None)
        for array in _flat(layer.state):
            if grows and array.ndim == 4:
                bytes_a_token = array.nbytes // array.shape[2]
                per_token += 0 if window else bytes_a_token
                per_row += bytes_a_token * (window or 0)
            else:
                per_row += array.nbytes
    return KVCost(per_token, per_row)


def _flat(state: Any) -> Iterator[mx.array]:
    if isinstance(state, mx.array):
        yield state
    elif isinstance(state, (list, tuple)):
        for item in state:
            yield from _flat(item)


def _padding_safe(model: Any, new_cache: caches.Factory, references: ReferenceStore) -> bool:
    """True if prompts of different lengths may be prefilled together.

    Only a positive result is stored for later workers: a negative result may come from a faulty
    device.
    """
    question = ("padding", _LONG, _SHORT, _TOLERANCE)
    if references.known(question):
        return True
    safe = _ends_as_alone(model, new_cache)
    if safe:
        references.store(question, safe)
    return safe


def _ends_as_alone(model: Any, new_cache: caches.Factory) -> bool:
    """True if two prompts of different lengths have the same logits prefilled together as each has
    alone, up to a tolerance."""
    together = _next_logits(model, new_cache, [_LONG, _SHORT])
    alone = mx.concatenate([_next_logits(model, new_cache, [p]) for p in (_LONG, _SHORT)])
    worst = mx.max(mx.abs(together - alone))
    return bool((worst <= _TOLERANCE * mx.std(alone)).item())


def _next_logits(model: Any, new_cache: caches.Factory, prompts: list[list[int]]) -> mx.array:
    """Prefills the prompts together and returns the logits after each prompt, shape [prompts,
    width]."""
    rows = [
        SequenceState(i, tokens, SequenceSampling.greedy(), 1) for i, tokens in enumerate(prompts)
    ]
    group = PrefillGroup(
        model, [Prompt("", row, 0, [], []) for row in rows], [new_cache() for _ in rows]
    )
    while group.left:
        group.feed(group.left)
    last = mx.array([[tokens[-1]] for tokens in prompts])
    output: mx.array = model(last, cache=group.split(range(len(prompts))))
    logits = output[:, -1, :].astype(mx.float32)
    mx.eval(logits)
    return logits
