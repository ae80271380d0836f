"""The memory and the pace of the engine while its batch never empties.

The size of the C heap is read from glibc: it holds MLX's unevaluated graphs, and shows a growth of
a kilobyte a step at once, where the process' resident memory shows it after thousands of steps.
"""

from __future__ import annotations

import ctypes
import gc
import platform
import random
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model

from mayfly_worker.engine import caches
from mayfly_worker.model.probe import probe
from mayfly_worker.model.reference_store import ReferenceStore
from support.engine_harness import EngineHarness, EngineRequest
from support.models import tiny

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the heap is read from glibc"),
]

ROWS = 3
GROWTH = 150_000
"""Bytes by which the heap may seem to grow between two readings, while MLX's buffers come and go
and up to 31 steps of state are unevaluated. Without an evaluation 192 steps of one layer took
310,000 bytes."""

FAMILIES: dict[str, dict[str, Any]] = {
    # A plain cache, whose offsets no layer without position embeddings reads.
    "smollm3": {"no_rope_layer_interval": 2},
    # Windows beside such a layer.
    "cohere2": {
        "layer_norm_eps": 1e-5,
        "logit_scale": 1.0,
        "sliding_window": tiny.SLIDING_WINDOW,
        "sliding_window_pattern": 2,
    },
    # Padding of recurrent states, which only the first such layer's mask reads.
    "mamba2": {},
    # Lists of both.
    "falcon_h1": {},
    # Recurrent layers whose prompts are prefilled one at a time, and attention without positions.
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 16,
        "mamba_expand": 2,
        "num_experts": 1,
        "num_experts_per_tok": 1,
    },
}


class MallInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


def heap_bytes() -> int:
    """Returns the bytes allocated on the C heap, without MLX's buffers, which on a CPU are there,
    too."""
    gc.collect()
    read = ctypes.CDLL(None).mallinfo2
    read.restype = MallInfo
    info = read()
    buffers = mx.get_active_memory() + mx.get_cache_memory() if not mx.cuda.is_available() else 0
    return int(info.uordblks + info.hblkhd - buffers)


def harness(folder: Path, architecture: str) -> EngineHarness:
    model = load_model(tiny.build(folder, architecture=architecture, **FAMILIES[architecture]))[0]
    found = probe(model, caches.factory(model), ReferenceStore.of("", ""))
    return EngineHarness(
        model, found.width, padding_safe=found.padding_safe, max_rows=ROWS, prefix_bytes=0
    )


@pytest.mark.parametrize("architecture", FAMILIES)
def test_M05_state_that_no_layer_reads_does_not_grow(tmp_path: Path, architecture: str) -> None:
    running = harness(tmp_path, architecture)
    for token in range(9, 9 + ROWS):
        running.submit(EngineRequest([token], max_tokens=1000))
    for _ in range(32):
        running.turn()
    before = heap_bytes()
    for _ in range(192):
        running.turn()
    assert heap_bytes() - before < GROWTH


@pytest.mark.long
@pytest.mark.parametrize("architecture", FAMILIES)
def test_M05_twenty_thousand_busy_steps(tmp_path: Path, architecture: str) -> None:
    """Rows of prompts of equal length come and go, and the batch never empties."""
    running = harness(tmp_path, architecture)
    rng = random.Random(5)
    heap, pace = [], []
    for turn in range(21_000):
        if turn % 1000 == 0:
            heap.append(heap_bytes())
            pace.append(time.process_time())
        while len(running.open) < ROWS:
            tokens = [rng.randrange(8, 1700) for _ in range(rng.choice([1, 4]))]
            running.submit(EngineRequest(tokens, max_tokens=rng.randrange(20, 100)))
        running.turn()
        running.answers = {key: running.answers[key] for key in running.open}
    took = [end - begin for begin, end in pairwise(pace)]
    print(architecture, "heap:", [h - heap[0] for h in heap], "seconds:", took)
    assert heap[-1] - heap[1] < 20 * GROWTH
    assert sum(took[-5:]) < 1.3 * sum(took[1:6])
