"""A beat, of all that a worker knows about itself."""

from __future__ import annotations

from collections.abc import Mapping

from mayfly_protocol.lifecycle import Beat, Memory
from mayfly_worker.engine.gauges import Gauges
from mayfly_worker.service.desk import Desk


def beat(
    gauges: Gauges,
    desk: Desk | None,
    *,
    leaving: bool,
    footprint: int,
    kv_budget: int,
    refused: Mapping[str, int],
) -> Beat:
    """``desk`` is None until the model is loaded; ``footprint`` and ``kv_budget`` are in bytes."""
    return Beat(
        phase="stopping" if leaving else gauges.phase,
        progress=gauges.progress,
        running=desk.running if desk else 0,
        waiting=desk.waiting if desk else 0,
        waiting_tokens=desk.waiting_tokens if desk else 0,
        inferences=desk.inferences if desk else 0,
        generated_tokens=gauges.generated_tokens,
        prompt_tokens=gauges.prompt_tokens,
        cached_tokens=gauges.cached_tokens,
        memory=Memory(
            footprint=footprint,
            active=gauges.active_bytes,
            cache=gauges.cache_bytes,
            peak=gauges.peak_bytes,
            prefix_cache=gauges.prefix_bytes,
            device_free=gauges.device_free,
        ),
        rows=gauges.rows,
        kv_bytes=gauges.kv_bytes,
        kv_budget=kv_budget,
        prefill_lengths=len(gauges.prefill_lengths),
        decode_s=gauges.decode_s.snapshot(),
        prefill_s=gauges.prefill_s.snapshot(),
        refused=dict(refused),
        preparing=desk.preparing if desk else 0,
    )
