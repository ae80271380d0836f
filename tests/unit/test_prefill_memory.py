"""The memory that prefill takes beside what mlx-lm's takes, on every kind of cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

from mayfly_worker.engine.chunks import ChunkSizer
from support.engine_harness import EngineHarness, EngineRequest
from support.models import tiny

pytestmark = pytest.mark.heavy

LENGTH = 3600
"""Tokens of a prompt: more than the first chunk and the largest one."""


def unhurried() -> ChunkSizer:
    """Returns a sizer by which time bounds no chunk."""
    return ChunkSizer(1e9, 1e9)


def peak(run: Any) -> int:
    """Returns the bytes that a function takes at its peak beyond those that it found."""
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    run()
    return mx.get_peak_memory() - before


KINDS: dict[str, dict[str, Any]] = {
    "windows": {"architecture": "gemma3_text", "sliding_window": 256},
    "all tokens": {"architecture": "llama"},
    "experts": {"architecture": "qwen3_moe"},
    "states": {"architecture": "mamba2"},
    "lists": {"architecture": "falcon_h1"},
}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=[pytest.mark.long] if k != "windows" else []) for k in KINDS],
)
def test_M10_a_long_prompt_takes_what_it_takes_in_mlx_lm(tmp_path: Path, kind: str) -> None:
    model = load_model(tiny.build(tmp_path, context=8192, hidden=32, **KINDS[kind]))[0]
    prompt = [8 + 7 * i % 1700 for i in range(LENGTH)]
    theirs = peak(lambda: list(generate_step(mx.array(prompt), model, max_tokens=1)))
    harness = EngineHarness(model, 1800, chunks=unhurried(), prefix_bytes=0)
    peaks = []

    def ours() -> None:
        harness.submit(EngineRequest(prompt, max_tokens=1))
        while harness.open:
            before = mx.get_active_memory()
            harness.turn()
            peaks.append(mx.get_peak_memory() - before)

    peak(ours)
    assert max(peaks) < 1.3 * theirs


def test_M10_chunks_shrink_to_the_memory_that_a_forward_pass_may_take(tmp_path: Path) -> None:
    model = load_model(tiny.build(tmp_path, context=8192, hidden=32))[0]
    ask = EngineRequest([8 + 7 * i % 1700 for i in range(1500)], max_tokens=1)
    chunks = []
    for room in (1 << 40, 1 << 20):
        harness = EngineHarness(model, 1800, chunks=unhurried(), prefix_bytes=0, pass_bytes=room)
        harness.run([ask])
        chunks.append(harness.engine.counters.chunk_lengths)
    assert max(chunks[0]) > 900
    assert max(chunks[1]) == 512, "of the first chunk nothing is known"
    assert min(chunks[1]) < 256
