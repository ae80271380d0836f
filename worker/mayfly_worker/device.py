"""What MLX says of the device that it computes on."""

from __future__ import annotations

import mlx.core as mx


def free_memory() -> int | None:
    """Bytes that no process uses now of a device that has memory of its own. MLX asks the driver
    anew at each call. None on Metal and on a CPU, whose memory is the machine's."""
    free = mx.device_info().get("free_memory")
    return free if isinstance(free, int) else None
