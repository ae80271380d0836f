"""How the memory of a machine is shared out to one worker.

::

    what the device recommends (most of what there is), this worker's share of it
      - weights
      - a tenth for what a forward pass needs
      = KV caches: running rows, and a quarter as much again kept as prefixes
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
    """Bytes of memory that all workers of this machine may use together: what Metal recommends,
    nine tenths of a CUDA device, three quarters of a machine without either."""
    info = mx.device_info()
    recommended = info.get("max_recommended_working_set_size")
    if isinstance(recommended, int) and recommended > 0:
        return recommended
    total = info.get("total_memory")
    if mx.cuda.is_available() and isinstance(total, int):
        return total * 9 // 10
    return psutil.virtual_memory().total * 3 // 4


def free_bytes() -> int:
    """Bytes that nobody uses now. On Metal that is not known; what is recommended stands for it."""
    free = admission.free_memory()
    if free is not None:
        return free
    return device_bytes() if mx.metal.is_available() else psutil.virtual_memory().available


def limit_bytes(settings: WorkerSettings, *, held: int = 0) -> int:
    """What a worker may use in all, of which it has ``held`` already."""
    return settings.memory_limit or min(_share(settings), free_bytes() + held)


def kv_bytes(settings: WorkerSettings, limit: int, weight_bytes: int) -> int:
    """What the caches of running rows may use; 0 or less where the weights do not fit."""
    return settings.kv_budget or int((limit - weight_bytes) * (1 - _HEADROOM) / 1.25)


def _share(settings: WorkerSettings) -> int:
    return int(device_bytes() * settings.memory_share)


def plan(settings: WorkerSettings, loaded: LoadedModel) -> Budget:
    """The admission budget of a loaded model, and MLX's own limits set to match it."""
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
    """The card with the context that memory can hold for one row, where that is less than what the
    model was made for: an answer that ends there has filled the context that clients were told."""
    if budget.bytes_per_token <= 0:
        return card
    room = max(1, budget.longest_alone())
    return replace(card, context=min(card.context or room, room))
