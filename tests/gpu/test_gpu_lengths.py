"""Prompts of two thousand different lengths on one worker, as its environment is by default: each
is a shape that the GPU's libraries plan anew, and with MLX's own settings its graph cache thrashes.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.gpu import ready, serving_on_gpu
from support.server import Server

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

LENGTHS = 2000
CLIENTS = 16
TOKENS = 8
PARTS = 4


def number(metrics: str, name: str) -> float:
    """A metric's value, summed over its labels."""
    lines = [line for line in metrics.splitlines() if line.startswith(f"{name}{{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def workers(server: Server) -> dict[str, tuple[int, int]]:
    return {name: (slot["incarnation"], slot["pid"]) for name, slot in ready(server).items()}


class Steps:
    """The mean time of decode steps and prefill chunks since it was last asked for, in ms."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._before = self._read()

    def _read(self) -> dict[str, float]:
        text = self._server.http.get("/metrics").text
        return {
            f"{what}_{part}": number(text, f"mayfly_worker_{what}_seconds_{part}")
            for what in ("decode_step", "prefill_chunk")
            for part in ("sum", "count")
        }

    def since(self) -> tuple[float, float]:
        now, before = self._read(), self._before
        self._before = now
        grown = {name: now[name] - before[name] for name in now}
        return (
            grown["decode_step_sum"] / grown["decode_step_count"] * 1e3,
            grown["prefill_chunk_sum"] / grown["prefill_chunk_count"] * 1e3,
        )


def test_two_thousand_lengths_fault_nothing(model: Path, tmp_path: Path) -> None:
    lengths = random.Random(0).sample(range(1, LENGTHS + 1), LENGTHS)
    with serving_on_gpu(model, tmp_path, workers=1) as server, ThreadPoolExecutor(CLIENTS) as pool:
        first = workers(server)

        def ask(length: int) -> int:
            body = {
                "model": server.model,
                "prompt": random.Random(length).choices(range(10, 1700), k=length),
                "max_tokens": TOKENS,
                "temperature": 0,
                "ignore_eos": True,
            }
            answer = server.post("/v1/completions", body)
            assert answer.status_code == 200, answer.text
            usage = answer.json()["usage"]
            assert usage["prompt_tokens"] == length
            return int(usage["completion_tokens"])

        steps = Steps(server)
        print("\n| requests | decode step ms | prefill chunk ms | lengths seen |", flush=True)
        for part in range(PARTS):
            mine = lengths[part * LENGTHS // PARTS : (part + 1) * LENGTHS // PARTS]
            assert set(pool.map(ask, mine)) == {TOKENS}
            decode, prefill = steps.since()
            seen = number(server.http.get("/metrics").text, "mayfly_worker_prefill_lengths")
            done = (part + 1) * LENGTHS // PARTS
            print(f"| {done} | {decode:.1f} | {prefill:.1f} | {seen:.0f} |", flush=True)
        assert server.autopsies() == []
        assert workers(server) == first
