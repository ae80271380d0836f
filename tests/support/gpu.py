"""Runs servers on a real NVIDIA GPU, and reads the GPU's memory with nvidia-smi."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mayfly_protocol.roster import Roster
from support.server import Server, serving, wait_for

START_S = 300.0
"""Seconds until a server has to be ready. Long, because the first worker compiles every kernel."""

BUDGETS = {"decode_s": 8.0, "retry_s": 0.1, "retry_max_s": 0.5, "spacing_s": 0.1}
"""Time limits of the reaper (the workers' supervisor) in seconds, shorter than the defaults to save
time on the GPU machine."""


@contextlib.contextmanager
def serving_on_gpu(
    model: Path, folder: Path, workers: int, environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Runs ``mayfly serve`` on the GPU; yields the server when all its workers are READY."""
    options = ("--trust-remote-code", "--workers", str(workers))
    with serving(
        model, folder, *options, wait=False, environment=environment, budgets=BUDGETS
    ) as server:
        try:
            server.wait_ready(START_S)
            wait_for(lambda: len(ready(server)) == workers, f"{workers} workers", START_S)
            yield server
        finally:
            print(f"\n{server.log()}", flush=True)  # pytest shows it where a test fails


def ready(server: Server) -> dict[str, dict[str, Any]]:
    """Returns the status entries of the server's READY workers, by the name of the slot (the place
    of one worker process)."""
    return {slot["slot"]: slot for slot in server.slots() if slot["state"] == "ready"}


def gpu_memory_mb() -> int:
    """Returns the memory of the first GPU that processes use, in MiB."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(query, check=True, capture_output=True, text=True).stdout)


def stages(rosters: list[tuple[float, Roster]], slot: str, incarnation: int) -> dict[str, float]:
    """Returns the time at which a worker was first reported in each state or phase (monotonic
    clock, seconds). ``rosters`` are the node's status messages with their times; slot and
    incarnation number name the worker."""
    seen: dict[str, float] = {}
    for at, roster in rosters:
        for view in roster.slots:
            if (view.slot, view.incarnation) == (slot, incarnation):
                name = "ready" if view.state == "ready" else view.phase or view.state
                seen.setdefault(name, at)
    return seen
