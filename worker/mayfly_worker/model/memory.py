"""Memory plan of one worker: the bytes that its weights and its KV caches may take.

::

    this worker's share of the memory that the device recommends (most of it)
      - weights
      - a tenth for the needs of a forward pass
      = KV caches: running sequences, and a quarter as much again for the prefix cache
"""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import psutil

from mayfly_protocol.lifecycle import ModelCard
from mayfly_protocol.settings import WorkerSettings
from mayfly_worker.engine import admission
from mayfly_worker.engine.admission import Budget
from mayfly_worker.model.loading import LoadedModel

_HEADROOM = 0.1
_LEAST = 64 << 20


def device_bytes() -> int:
    """Returns the bytes that all workers of this machine may use together: what Metal recommends,
    nine tenths of a CUDA device's memory, or three quarters of the main memory if there is
    neither."""
    info = mx.device_info()
    recommended = info.get("max_recommended_working_set_size")
    if isinstance(recommended, int) and recommended > 0:
        return recommended
    total = info.get("total_memory")
    if mx.cuda.is_available() and isinstance(total, int):
        return total * 9 // 10
    return psutil.virtual_memory().total * 3 // 4


def free_bytes() -> int:
    """Returns the free bytes of the CUDA device, or of the main memory on a CPU; on Metal, which
    does not report free bytes, the bytes that Metal recommends to use."""
    free = admission.free_memory()
    if free is not None:
        return free
    return device_bytes() if mx.metal.is_available() else psutil.virtual_memory().available


def limit_bytes(settings: WorkerSettings, *, held: int = 0) -> int:
    """Returns the bytes that a worker may use in all, including ``held`` bytes that it uses
    already: the limit in its settings if there is one, else its share of the device's memory, but
    no more than the free bytes and ``held`` together."""
    return settings.memory_limit or min(_share(settings), free_bytes() + held)


def kv_bytes(settings: WorkerSettings, limit: int, weight_bytes: int) -> int:
    """Returns the bytes for the KV caches of running sequences if the worker may use ``limit``
    bytes in all; 0 or less if the weights do not fit."""
    return settings.kv_budget or int((limit - weight_bytes) * (1 - _HEADROOM) / 1.25)


def _share(settings: WorkerSettings) -> int:
    return int(device_bytes() * settings.memory_share)


def plan(settings: WorkerSettings, loaded: LoadedModel) -> Budget:
    """Returns the memory budget by which a loaded model's requests are admitted, and sets MLX's own
    memory limits to match."""
    weights = loaded.card.weight_bytes
    limit = limit_bytes(settings, held=weights)
    if settings.memory_limit:
        mx.set_memory_limit(settings.memory_limit)
    if mx.metal.is_available():
        # Several workers must not each wire all the memory that Metal recommends.
        mx.set_wired_limit(min(limit, _share(settings)))
    mx.set_cache_limit(max(_LEAST, limit // 10))
    return Budget(
        max_rows=loaded.card.rows,
        kv_bytes=max(_LEAST, kv_bytes(settings, limit, weights)),
        bytes_per_token=loaded.probe.cost.per_token,
        bytes_per_row=loaded.probe.cost.per_row,
        pass_bytes=max(_LEAST, int((limit - weights) * _HEADROOM)),
    )


def within(card: ModelCard, budget: Budget) -> ModelCard:
    """Returns the model card (what front ends know of the model) with its context reduced to the
    length that memory can hold for one sequence.

    Clients are shown this context, so an answer that fills the memory has filled the context, too.
    """
    if budget.bytes_per_token <= 0:
        return card
    room = max(1, budget.longest_alone())
    if card.context and card.context <= room:
        return card
    source = "what fits into memory"
    if card.context:
        source += f", instead of {card.context:,} by {card.context_from}"
    return replace(card, context=room, context_from=source)
