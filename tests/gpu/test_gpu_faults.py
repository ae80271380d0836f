"""Real faults of a real GPU: two workers share it, each with a model of a billion parameters, and
one of them accesses invalid memory, runs out of memory, hangs or is killed while both serve."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.chaos_client import StreamingClient
from support.gpu import gpu_memory_mb, ready, serving_on_gpu, stages
from support.models import cuda
from support.server import Server, wait_for
from support.server_watch import ServerWatch

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

STREAMS = 8
TOKENS = 400
INTERRUPTED_S = 1.0
"""A stream that stood still so long was on the worker that was lost."""

THRASH = {"MLX_ENABLE_CACHE_THRASHING_CHECK": "1", "MLX_CUDA_GRAPH_CACHE_SIZE": "2"}


@dataclass(frozen=True)
class GpuFaultCase:
    """A fault, the kind that it is to be known as, and what of it is to stand as first cause."""

    fault: str
    kind: str
    cause: str


LOST = [
    GpuFaultCase("illegal", "cuda_sticky", "an illegal memory access was encountered"),
    GpuFaultCase("kill", "killed", "SIGKILL from outside"),
    GpuFaultCase("spin", "wedged", "no progress in"),
]


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving_on_gpu(model, tmp_path_factory.mktemp("faults"), workers=2) as server:
        yield server


@dataclass
class FaultRun:
    """Streams on both workers while one of them met a fault."""

    fault_at: float
    over_at: float
    watch: ServerWatch
    answers: list[Any]
    memory_mb: tuple[int, int]

    @property
    def interrupted(self) -> int:
        return sum(answer.gap_s > INTERRUPTED_S for answer in self.answers)

    @property
    def longest_gap_s(self) -> float:
        return float(max(answer.gap_s for answer in self.answers))


def run_fault(server: Server, fault: str, replaced: int) -> FaultRun:
    """Runs streams on both workers and a request that makes one of them fail, until all have ended
    and ``replaced`` workers have successors."""
    before, used = ready(server), gpu_memory_mb()
    assert len(before) == 2
    extra = {"ignore_eos": True}
    with ServerWatch(server) as watch:
        streams = [
            StreamingClient(
                server, f"Story {n} was told", max_tokens=TOKENS, temperature=0, extra_body=extra
            )
            for n in range(STREAMS)
        ]
        wait_for(lambda: all(len(s.answer.at) > 20 for s in streams), "tokens of every stream")
        fault_at = time.monotonic()
        words = f"It rained{cuda.trigger(fault)}."
        streams.append(
            StreamingClient(server, words, max_tokens=TOKENS, temperature=0, extra_body=extra)
        )
        answers = [stream.result() for stream in streams]

        def whole_again() -> bool:
            now = ready(server)
            news = sum(now[s]["incarnation"] > before[s]["incarnation"] for s in now)
            return len(now) == 2 and news == replaced

        wait_for(whole_again, "both workers to be ready", 200)
        over_at = time.monotonic()
    for answer in answers:
        assert answer.finish == "length"
        assert answer.usage[1] == TOKENS
    assert all(probe.status == 200 for probe in watch.probes), "one worker was READY all the time"
    return FaultRun(fault_at, over_at, watch, answers, (used, gpu_memory_mb()))


def report(case: GpuFaultCase, run: FaultRun, recovery: str) -> None:
    before, after = run.memory_mb
    print(
        f"\n| {case.fault} | {case.kind} | {len(run.answers)} | {run.interrupted} | 0 "
        f"| {run.longest_gap_s:.2f} | {recovery} | {before} / {after} |",
        flush=True,
    )


@pytest.mark.parametrize("case", LOST, ids=lambda case: case.fault)
def test_a_worker_is_lost_and_its_sibling_and_every_stream_go_on(
    server: Server, case: GpuFaultCase
) -> None:
    before, autopsies = ready(server), len(server.autopsies())
    run = run_fault(server, case.fault, replaced=1)
    [autopsy] = server.autopsies()[autopsies:]
    assert autopsy["kind"] == case.kind
    assert case.cause in autopsy["first_cause"]["text"]
    after = ready(server)
    [lost] = [slot for slot in before if before[slot]["pid"] != after[slot]["pid"]]
    assert autopsy["slot"] == lost
    # What the successor has not cached yet is less, never more.
    assert run.memory_mb[1] <= run.memory_mb[0] + 1000

    seen = stages(run.watch.rosters, lost, int(after[lost]["incarnation"]))
    began = min(seen.values())
    known = f"{began - run.fault_at:.1f}"
    steps = ", ".join(f"{name} {at - began:.1f}" for name, at in seen.items())
    report(case, run, f"{seen['ready'] - run.fault_at:.1f} (spawned after {known}; {steps})")


def test_memory_that_runs_out_in_the_middle_of_a_batch_costs_no_worker(server: Server) -> None:
    before, autopsies = ready(server), len(server.autopsies())
    case = GpuFaultCase("memory", "cuda_out_of_memory", "out of memory")
    run = run_fault(server, "memory", replaced=0)
    assert len(server.autopsies()) == autopsies
    assert f"batch fault {case.kind}" in server.log()
    assert {s: w["pid"] for s, w in ready(server).items()} == {
        s: w["pid"] for s, w in before.items()
    }
    report(case, run, "0 (rebuilt)")


def test_a_graph_cache_that_thrashes_ends_without_graphs(model: Path, tmp_path: Path) -> None:
    """MLX's own check raises in every request; after two workers the next runs without graphs."""
    began = time.monotonic()
    with serving_on_gpu(model, tmp_path, workers=1, environment=THRASH) as server:
        took = time.monotonic() - began
        for n in range(4):
            body = {"max_tokens": 40, "extra_body": {"ignore_eos": True}}
            assert server.chat(f"Story {n}", **body).choices[0].finish_reason == "length"
        lost = server.autopsies()
        assert lost
        assert {autopsy["kind"] for autopsy in lost} == {"cuda_graph_thrash"}
        for autopsy in lost:
            assert "Cache thrashing is happening" in autopsy["first_cause"]["text"]
        print(f"\ngraph cache of 2: {len(lost)} workers lost, READY after {took:.1f} s", flush=True)
