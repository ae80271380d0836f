"""The worker processes of a pool, as a server's status lists them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil

POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class PoolWorker:
    """A worker of the pool."""

    slot: str
    pid: int
    incarnation: int
    state: str
    model: str
    busy: int
    """Requests that run or wait in it."""
    done: tuple[int, int]
    """Choices that it finished and tokens that it generated: they grow if there is traffic."""

    @property
    def ready(self) -> bool:
        return self.state == "ready"

    @property
    def is_local(self) -> bool:
        """True if its process runs on this machine, and the process is a worker."""
        try:
            return any("mayfly_worker" in word for word in psutil.Process(self.pid).cmdline())
        except psutil.Error:
            return False


ReadWorkers = Callable[[], list[PoolWorker]]
"""Asks the server for the workers of the pool."""


def workers_of(status: dict[str, Any]) -> list[PoolWorker]:
    """Reads the workers from a server's status."""
    return [
        PoolWorker(
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


def has_traffic(read_workers: ReadWorkers, watch_s: float) -> bool:
    """Returns True if the pool has requests now or after ``watch_s`` seconds, or finished some in
    between."""
    before = read_workers()
    if any(worker.busy for worker in before):
        return True
    time.sleep(watch_s)
    after = read_workers()
    return any(worker.busy for worker in after) or {w.done for w in before} != {
        w.done for w in after
    }


def signal_busiest(
    read_workers: ReadWorkers, number: signal.Signals, wait_s: float
) -> tuple[PoolWorker, float] | None:
    """Sends a signal to the busiest ready worker on this machine. Returns that worker and the time;
    None if there is no such worker for ``wait_s`` seconds."""
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        target = busiest(read_workers)
        if target is not None:
            with contextlib.suppress(ProcessLookupError):
                return target, send_signal(target, number)
        time.sleep(POLL_S)
    return None


def busiest(read_workers: ReadWorkers) -> PoolWorker | None:
    """Returns the ready worker on this machine with most requests; None if there is none."""
    ready = [worker for worker in read_workers() if worker.ready and worker.is_local]
    return max(ready, key=lambda worker: worker.busy, default=None)


def send_signal(worker: PoolWorker, number: signal.Signals) -> float:
    """Sends a signal to a worker's process; returns the time by the monotonic clock.

    Raises:
        ProcessLookupError: the process has ended already.
    """
    at = time.monotonic()
    os.kill(worker.pid, number)
    return at


def resume(worker: PoolWorker) -> None:
    """Continues a stopped process that the reaper has not ended, so that none stays stopped."""
    if worker.is_local:
        os.kill(worker.pid, signal.SIGCONT)


def wait_full_capacity(
    read_workers: ReadWorkers, signalled: PoolWorker, count: int, wait_s: float
) -> float | None:
    """Waits until ``count`` workers are ready and the signalled worker is replaced. Returns the
    time; None after ``wait_s`` seconds."""
    deadline = time.monotonic() + wait_s
    old = (signalled.slot, signalled.incarnation)
    while time.monotonic() < deadline:
        found = read_workers()
        replaced = all((worker.slot, worker.incarnation) != old for worker in found)
        if replaced and sum(worker.ready for worker in found) >= count:
            return time.monotonic()
        time.sleep(POLL_S)
    return None
