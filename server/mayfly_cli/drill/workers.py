"""The worker processes of a pool, as a server's status tells of them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil

LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Worker:
    slot: str
    pid: int
    incarnation: int
    state: str
    model: str
    busy: int
    """Requests that it has."""
    done: tuple[int, int]
    """Choices that it finished and tokens that it generated: they grow where there is traffic."""

    @property
    def ready(self) -> bool:
        return self.state == "ready"

    @property
    def here(self) -> bool:
        """Whether its process runs on this machine, and is a worker's."""
        try:
            return any("mayfly_worker" in word for word in psutil.Process(self.pid).cmdline())
        except psutil.Error:
            return False


Look = Callable[[], list[Worker]]
"""Asks the server for the workers of the pool."""


def workers(status: dict[str, Any]) -> list[Worker]:
    return [
        Worker(
            slot=f"{node['node']}/{slot['slot']}",
            pid=slot["pid"],
            incarnation=slot["incarnation"],
            state=slot["state"],
            model=slot["model"],
            busy=slot["running"] + slot["waiting"],
            done=(slot["inferences"], slot["generated_tokens"]),
        )
        for node in status["nodes"]
        for slot in node["slots"]
    ]


def has_traffic(look: Look, watch_s: float) -> bool:
    """Whether anybody else uses the pool: does it have requests, or finish some meanwhile?"""
    before = look()
    if any(worker.busy for worker in before):
        return True
    time.sleep(watch_s)
    after = look()
    return any(worker.busy for worker in after) or {w.done for w in before} != {
        w.done for w in after
    }


def strike_busiest(
    look: Look, number: signal.Signals, wait_s: float
) -> tuple[Worker, float] | None:
    """Strikes the ready worker on this machine that has most to lose; which, and when. None if
    there is none for ``wait_s`` seconds."""
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        target = busiest(look)
        if target is not None:
            with contextlib.suppress(ProcessLookupError):
                return target, strike(target, number)
        time.sleep(LOOK_S)
    return None


def busiest(look: Look) -> Worker | None:
    """The ready worker on this machine that has most to lose."""
    ready = [worker for worker in look() if worker.ready and worker.here]
    return max(ready, key=lambda worker: worker.busy, default=None)


def strike(worker: Worker, number: signal.Signals) -> float:
    """Sends a signal to its process; returns when, by the monotonic clock.

    Raises:
        ProcessLookupError: it is gone already.
    """
    at = time.monotonic()
    os.kill(worker.pid, number)
    return at


def wake(worker: Worker) -> None:
    """Leaves no process stopped that nobody else has ended."""
    if worker.here:
        os.kill(worker.pid, signal.SIGCONT)


def full_capacity(look: Look, struck: Worker, count: int, wait_s: float) -> float | None:
    """Waits until ``count`` workers are ready and the struck one is not among them; returns when,
    or None after ``wait_s`` seconds."""
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        found = look()
        gone = all((w.slot, w.incarnation) != (struck.slot, struck.incarnation) for w in found)
        if gone and sum(worker.ready for worker in found) >= count:
            return time.monotonic()
        time.sleep(LOOK_S)
    return None
