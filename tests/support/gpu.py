"""Servers on a real GPU, and the GPU's memory by nvidia-smi."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mayfly_protocol.roster import Roster
from support.server import Server, serving, wait_for

START_S = 300.0
"""The first worker compiles every kernel that it meets."""

BUDGETS = {"decode_s": 8.0, "retry_s": 0.1, "retry_max_s": 0.5, "spacing_s": 0.1}
"""Shorter than by default, so that the GPU is not lent for waiting."""


@contextlib.contextmanager
def serving_on_gpu(
    model: Path, folder: Path, workers: int, environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Runs a server, and waits until all its workers are READY."""
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
    """Returns the workers that are READY, by slot."""
    return {slot["slot"]: slot for slot in server.slots() if slot["state"] == "ready"}


def gpu_memory_mb() -> int:
    """Returns the memory that all processes use of the first GPU, in MB."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(query, check=True, capture_output=True, text=True).stdout)


def stages(rosters: list[tuple[float, Roster]], slot: str, incarnation: int) -> dict[str, float]:
    """Returns when a worker was first seen in each of its states and phases, by the monotonic
    clock."""
    seen: dict[str, float] = {}
    for at, roster in rosters:
        for view in roster.slots:
            if (view.slot, view.incarnation) == (slot, incarnation):
                name = "ready" if view.state == "ready" else view.phase or view.state
                seen.setdefault(name, at)
    return seen
