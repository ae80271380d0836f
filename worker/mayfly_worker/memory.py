"""How the memory of a machine is shared out to one worker.

::

    what the device recommends (or three quarters of what there is)
      - weights
      - a tenth for what a forward pass needs
      = KV caches: running rows, and a quarter as much again kept as prefixes
"""

from __future__ import annotations

import mlx.core as mx
import psutil

from mayfly_protocol.settings import WorkerSettings
from mayfly_worker.engine.admission import Budget
from mayfly_worker.loading import Loaded

_HEADROOM = 0.1
_LEAST = 64 << 20


def device_bytes() -> int:
    """Bytes of memory that a worker may use when nobody says otherwise."""
    info = mx.device_info()
    for name in ("max_recommended_working_set_size", "free_memory", "total_memory"):
        if isinstance(value := info.get(name), int) and value > 0:
            return value
    return psutil.virtual_memory().available * 3 // 4


def plan(settings: WorkerSettings, loaded: Loaded) -> Budget:
    """The admission budget of a loaded model, and MLX's own limits set to match it."""
    limit = settings.memory_limit or device_bytes() + loaded.card.weight_bytes
    kv = settings.kv_budget or int((limit - loaded.card.weight_bytes) * (1 - _HEADROOM) / 1.25)
    if settings.memory_limit:
        mx.set_memory_limit(settings.memory_limit)
    mx.set_cache_limit(max(_LEAST, limit // 10))
    return Budget(
        max_rows=loaded.card.rows,
        kv_bytes=max(_LEAST, kv),
        bytes_per_token=loaded.probe.cost.per_token,
        bytes_per_row=loaded.probe.cost.per_row,
    )
