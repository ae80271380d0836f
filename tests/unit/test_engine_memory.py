"""The memory and the pace of the engine while its batch never empties.

The size of the C heap is read from glibc: it holds MLX's unevaluated graphs, and shows a growth of
a kilobyte a step at once, where the process' resident memory shows it after thousands of steps.
"""

from __future__ import annotations

import ctypes
import gc
import platform
import random
import statistics
import time
from dataclasses import dataclass, field
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


IN_CI = {*FAMILIES, "first tokens kept", "quantized"}


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


@dataclass(frozen=True)
class Kind:
    """A kind of cache: a model that has it, and the options of the KV cache."""

    architecture: str
    config: dict[str, Any] = field(default_factory=dict)
    max_kv_size: int | None = None
    kv_bits: int | None = None


KINDS = {
    **{name: Kind(name, config) for name, config in FAMILIES.items()},
    "plain": Kind("llama"),
    "windows": Kind("gemma3_text"),
    "first tokens kept": Kind("llama", max_kv_size=tiny.SLIDING_WINDOW),
    "quantized": Kind("llama", {"head_dim": 32}, kv_bits=4),
    "quantized beside windows": Kind("gemma3_text", {"head_dim": 32}, kv_bits=8),
    "states": Kind("mamba"),
    "states beside plain": Kind("qwen3_next"),
    "chunked": Kind("llama4", {"text_config": tiny.LLAMA4}),
    "compressed": Kind(
        "deepseek_v3",
        {
            "kv_lora_rank": 32,
            "q_lora_rank": None,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "n_routed_experts": None,
            "n_shared_experts": None,
        },
    ),
}


def harness(folder: Path, kind: Kind) -> EngineHarness:
    model = load_model(tiny.build(folder, architecture=kind.architecture, **kind.config))[0]
    options = {"max_kv_size": kind.max_kv_size, "kv_bits": kind.kv_bits}
    found = probe(model, caches.factory(model, **options), ReferenceStore.of("", ""))
    return EngineHarness(
        model,
        found.width,
        batchable=found.batchable,
        padding_safe=found.padding_safe,
        max_rows=ROWS if found.batchable else 1,
        prefix_bytes=0,
        **options,
    )


@pytest.mark.parametrize(
    "name",
    [pytest.param(k, marks=[] if k in IN_CI else [pytest.mark.long]) for k in KINDS],
)
def test_M05_state_that_no_layer_reads_does_not_grow(tmp_path: Path, name: str) -> None:
    running = harness(tmp_path, KINDS[name])
    for token in range(9, 9 + ROWS):
        running.submit(EngineRequest([token], max_tokens=1000))
    for _ in range(32):
        running.turn()
    before = heap_bytes()
    for _ in range(192):
        running.turn()
    assert heap_bytes() - before < GROWTH


def work(running: EngineHarness, rng: random.Random, turns: int) -> tuple[float, int]:
    """Runs turns of an engine whose batch never empties: rows come and go, some with prompts beyond
    any window. Returns the processor's seconds that they took, and the most bytes of MLX's arrays
    after any of them."""
    begin, most = time.process_time(), 0
    for _ in range(turns):
        # Enough requests that a row that ends has a successor at once, also where one runs alone.
        while len(running.open) < 2 * ROWS:
            tokens = [rng.randrange(8, 1700) for _ in range(rng.choice([1, 4, 4, 40]))]
            running.submit(EngineRequest(tokens, max_tokens=rng.randrange(20, 100)))
        running.turn()
        most = max(most, mx.get_active_memory())
        running.answers = {key: running.answers[key] for key in running.open}
    return time.process_time() - begin, most


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_M05_twenty_thousand_busy_steps(tmp_path: Path, name: str) -> None:
    """Memory stays what it was after 1,000 steps, and the pace that of an engine that has just
    begun: the two take turns, because a machine's pace changes with its other work."""
    running, rng = harness(tmp_path, KINDS[name]), random.Random(5)
    heap, active = [], []
    for _ in range(42):
        active.append(work(running, rng, 500)[1])
        heap.append(heap_bytes())
    steps = running.engine.counters.steps
    fresh, other = harness(tmp_path, KINDS[name]), random.Random(6)
    work(fresh, other, 200)
    ratios = [work(running, rng, 100)[0] / work(fresh, other, 100)[0] for _ in range(20)]
    pace = statistics.median(ratios)
    print(
        f"{name}: {steps} steps; heap grew by {(heap[-1] - heap[1]) / 1e3:.0f} kB; most active "
        f"memory {max(active[2:6]) / 1e6:.2f} MB, then {max(active[-4:]) / 1e6:.2f}; "
        f"time a step {pace:.2f} of a fresh engine's"
    )
    assert steps > 20_000
    assert heap[-1] - heap[1] < 20 * GROWTH
    assert max(active[-4:]) < 1.2 * max(active[2:6])
    assert pace < 1.25
