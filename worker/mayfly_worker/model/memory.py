"""Memory plan of one worker.

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
    """Returns the bytes that all workers of this machine may use together: Metal's recommendation,
    nine tenths of a CUDA device, three quarters of the memory of a machine without either."""
    info = mx.device_info()
    recommended = info.get("max_recommended_working_set_size")
    if isinstance(recommended, int) and recommended > 0:
        return recommended
    total = info.get("total_memory")
    if mx.cuda.is_available() and isinstance(total, int):
        return total * 9 // 10
    return psutil.virtual_memory().total * 3 // 4


def free_bytes() -> int:
    """Returns the free bytes; on Metal, where they are not known, the recommended ones."""
    free = admission.free_memory()
    if free is not None:
        return free
    return device_bytes() if mx.metal.is_available() else psutil.virtual_memory().available


def limit_bytes(settings: WorkerSettings, *, held: int = 0) -> int:
    """Returns the bytes that a worker may use in all; it has ``held`` of them already."""
    return settings.memory_limit or min(_share(settings), free_bytes() + held)


def kv_bytes(settings: WorkerSettings, limit: int, weight_bytes: int) -> int:
    """Returns the bytes for caches of running sequences; 0 or less if the weights do not fit."""
    return settings.kv_budget or int((limit - weight_bytes) * (1 - _HEADROOM) / 1.25)


def _share(settings: WorkerSettings) -> int:
    return int(device_bytes() * settings.memory_share)


def plan(settings: WorkerSettings, loaded: LoadedModel) -> Budget:
    """Returns the admission budget of a loaded model, and sets MLX's own limits to match it."""
    weights = loaded.card.weight_bytes
    limit = limit_bytes(settings, held=weights)
    if settings.memory_limit:
        mx.set_memory_limit(settings.memory_limit)
    if mx.metal.is_available():
        # Several workers must not each wire all that is recommended.
        mx.set_wired_limit(min(limit, _share(settings)))
    mx.set_cache_limit(max(_LEAST, limit // 10))
    return Budget(
        max_rows=loaded.card.rows,
        kv_bytes=max(_LEAST, kv_bytes(settings, limit, weights)),
        bytes_per_token=loaded.probe.cost.per_token,
        bytes_per_row=loaded.probe.cost.per_row,
    )


def within(card: ModelCard, budget: Budget) -> ModelCard:
    """Returns the card with its context reduced to the length that memory can hold for one
    sequence.

    An answer that ends there has filled the context that clients see.
    """
    if budget.bytes_per_token <= 0:
        return card
    room = max(1, budget.longest_alone())
    return replace(card, context=min(card.context or room, room))
