"""Measures how long a server takes to serve again after its worker was killed, by the size of the
model.

The models are random-weight float32 Llamas of different sizes. For each, ``mayfly serve`` runs with
one worker, which is killed (SIGKILL) again and again. The phases end at the worker's states as the
reaper, the workers' supervisor, publishes them in its status messages (rosters); in the state
CANARY the new worker answers a test prompt::

    kill ---> no longer READY ---> SPAWNING ---> LOADING -----> CANARY ----> READY ---> /readyz
      noticed              waited         imported      loaded       canary       ready

A request is sent at the kill and waits for the new worker; ``token`` is the time from the kill to
its first token, ``/readyz`` the time from the kill until /readyz is 200. ``CPU s`` is the CPU time
of the new worker until it was READY, which depends less on other work on the machine. With two
workers, the worker of a running stream is killed: ``gap`` is the longest time between two of the
stream's tokens, ``usual`` the longest in the same stream undisturbed. Prints medians in seconds.

    python bench/recovery.py [--sizes 10 100 400 1000] [--kills 3] [--workers 1 2]

With ``--against FOLDER``, another source tree of Mayfly (``git worktree add FOLDER COMMIT``), the
only worker of one server of each tree is killed in turn, and the ratio of this tree's times to the
other's is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import math
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import zmq
from client import Timing, chat, stream
from kills import PATIENCE_S, Probe, ready
from processes import cpu_s
from servers import Mayfly

from mayfly_protocol.codec import rosters
from mayfly_protocol.roster import ROSTER_TOPIC
from mayfly_reaper.paths import runtime_of

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support.models import tiny

SHAPES = {10: (256, 3), 100: (1024, 2), 400: (1024, 10), 1000: (2048, 6)}
"""Hidden size and number of layers of the models, by their approximate size in MB."""
PHASES = ("noticed", "waited", "imported", "loaded", "canary", "ready")
TOTALS = ("/readyz", "token", "CPU s")
STATES = ("spawning", "loading", "canary", "ready")
STREAM_S = 4.0
"""Approximate duration in seconds of a stream whose worker is killed in its middle."""
MOST_TOKENS = 1500


class Watch(threading.Thread):
    """A thread that follows a slot (the place of one worker process) in the node's status messages:
    notes when the old worker was first not READY, and when the new one first had each state.
    Listens from the object's making on."""

    def __init__(self, context: zmq.Context[Any], address: str, slot: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self._slot = slot["slot"].rpartition("/")[2]
        self._old = slot["incarnation"]
        self._node = context.socket(zmq.SUB)
        self._node.subscribe(ROSTER_TOPIC)
        self._node.connect(address)
        self._node.recv_multipart()
        self.at: dict[str, float] = {}
        self.cpu_s = math.nan

    def run(self) -> None:
        with self._node:
            while "ready" not in self.at:
                self._take(rosters.decode(self._node.recv_multipart()[1]), time.monotonic())

    def _take(self, roster: Any, now: float) -> None:
        views = [view for view in roster.slots if view.slot == self._slot]
        if not any(view.incarnation == self._old and view.state == "ready" for view in views):
            self.at.setdefault("noticed", now)
        for view in views:
            if view.incarnation > self._old and view.state in STATES:
                self.at.setdefault(view.state, now)
                if view.state == "ready":
                    self.cpu_s = cpu_s(psutil.Process(view.pid))


def phases(killed_at: float, at: dict[str, float], ready_at: float) -> list[float]:
    """Seconds of each of PHASES. A state that passed between two of the reaper's status messages,
    so that ``at`` lacks its time, counts as 0 s."""
    times = [killed_at, at["noticed"], *(at.get(state, math.nan) for state in STATES), ready_at]
    for index in reversed(range(len(times) - 1)):
        if math.isnan(times[index]):
            times[index] = times[index + 1]
    return [after - before for before, after in itertools.pairwise(times)]


@contextlib.contextmanager
def environment(tree: Path | None) -> Iterator[None]:
    """Makes processes that are started within the context import Mayfly from this source tree."""
    if tree is None:
        yield
        return
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        str(tree.resolve() / part) for part in ("protocol", "worker", "server")
    )
    try:
        yield
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before


class Subject:
    """A server whose workers are killed to measure its recovery."""

    def __init__(self, model: Path, folder: Path, workers: int, tree: Path | None = None) -> None:
        self.model = model
        name = f"{model.name}-{workers}{'-other' if tree else ''}"
        with environment(tree):
            self._server = Mayfly(model, folder / name, "--workers", workers)
        self.port = self._server.port
        self._address = runtime_of(self._server.state).roster
        self.probe = Probe(self.port)

    def __enter__(self) -> Subject:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()

    async def ask(self, tokens: int) -> Timing:
        return await stream(
            "127.0.0.1", self.port, chat(self.model.name, "Tell me a story", tokens)
        )

    async def recovery(self, context: zmq.Context[Any], after: int) -> tuple[int, list[float]]:
        """Waits for a worker with an incarnation number above ``after``, kills it, and waits for
        its replacement. Returns the killed worker's incarnation number, and the seconds of all
        PHASES and TOTALS."""
        slot = ready(self.probe, after)
        await self.ask(2)
        watch = Watch(context, self._address, slot)
        watch.start()
        killed_at = time.monotonic()
        os.kill(slot["pid"], signal.SIGKILL)
        waiting = asyncio.create_task(self.ask(1))
        ready_at = await asyncio.to_thread(self._ready_again)
        timing = await waiting
        await asyncio.to_thread(watch.join, PATIENCE_S)
        found = phases(killed_at, watch.at, ready_at)
        return slot["incarnation"], [*found, ready_at - killed_at, timing.ttft, watch.cpu_s]

    def _ready_again(self) -> float:
        for unready in (False, True):
            while (self.probe.health() != 200) is unready:
                time.sleep(0.005)
        return time.monotonic()

    async def gap(self) -> tuple[float, float]:
        """Kills one of two READY workers in the middle of its stream. Returns the longest time
        between two tokens of that stream, and of the same stream undisturbed, in seconds."""
        await asyncio.to_thread(self._all_ready)
        few = await self.ask(8)
        tokens = min(MOST_TOKENS, round(STREAM_S / statistics.mean(few.gaps)))
        usual = max((await self.ask(tokens)).gaps)
        running = asyncio.create_task(self.ask(tokens))
        while not (busy := [slot for slot in self.probe.slots() if slot["running"]]):
            if running.done():
                raise RuntimeError("the stream ended before its worker was seen to be busy")
            await asyncio.sleep(0.02)
        os.kill(busy[0]["pid"], signal.SIGKILL)
        return max((await running).gaps), usual

    def _all_ready(self) -> None:
        while any(slot["state"] != "ready" for slot in self.probe.slots()):
            time.sleep(0.1)


async def recoveries(subject: Subject, kills: int) -> list[list[float]]:
    found, last = [], 0
    with zmq.Context() as context:
        for _ in range(kills):
            last, seconds = await subject.recovery(context, last)
            found.append(seconds)
    return found


async def gaps(subject: Subject, kills: int) -> list[tuple[float, float]]:
    return [await subject.gap() for _ in range(kills)]


def megabytes(model: Path) -> float:
    return sum(file.stat().st_size for file in model.glob("*.safetensors")) / 1e6


def report_alone(model: Path, found: list[list[float]]) -> None:
    medians = " | ".join(f"{statistics.median(values):.2f}" for values in zip(*found, strict=True))
    to_ready = [seconds[-len(TOTALS)] for seconds in found]
    print(
        f"| {megabytes(model):.0f} MB | {medians} | {min(to_ready):.2f}-{max(to_ready):.2f} |",
        flush=True,
    )


async def in_turn(ours: Subject, other: Subject, kills: int) -> list[list[list[float]]]:
    """Kills the workers of two servers in turn; returns, for each server, the seconds of its
    recoveries."""
    subjects, lasts = (ours, other), [0, 0]
    found: list[list[list[float]]] = [[], []]
    with zmq.Context() as context:
        for number, which in itertools.product(range(-1, kills), (0, 1)):
            lasts[which], seconds = await subjects[which].recovery(context, lasts[which])
            if number >= 0:  # round -1 reads files that are in no cache; not counted
                found[which].append(seconds)
    return found


def report_against(model: Path, found: list[list[list[float]]]) -> None:
    spreads = []
    for column in (-len(TOTALS), -1):
        ratios = [ours[column] / other[column] for ours, other in zip(*found, strict=True)]
        spreads.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})")
    for name, each, last in zip(
        ("this", "other"), found, (" | ".join(spreads), "- | -"), strict=True
    ):
        medians = (statistics.median(values) for values in zip(*each, strict=True))
        cells = " | ".join(f"{median:.2f}" for median in medians)
        print(f"| {megabytes(model):.0f} MB, {name} | {cells} | {last} |", flush=True)


def report_gaps(model: Path, found: list[tuple[float, float]]) -> None:
    disturbed, usual = zip(*found, strict=True)
    print(
        f"| {megabytes(model):.0f} MB | {statistics.median(disturbed):.2f} "
        f"| {max(disturbed):.2f} | {statistics.median(usual):.2f} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], choices=[1, 2])
    parser.add_argument("--against", type=Path, help="another source tree, to compare with")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mayfly-bench-") as name:
        folder = Path(name)
        models = []
        for size in options.sizes:
            hidden, layers = SHAPES[size]
            models.append(tiny.build(folder / f"{size}mb", hidden=hidden, layers=layers))
        if 1 in options.workers:
            last = ["range"]
            if options.against is not None:
                last = ["this / other: /readyz", "CPU"]
            columns = ["weights", *PHASES, *TOTALS, *last]
            print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
            for model in models:
                if options.against is not None:
                    with (
                        Subject(model, folder, 1) as ours,
                        Subject(model, folder, 1, options.against) as other,
                    ):
                        report_against(model, asyncio.run(in_turn(ours, other, options.kills)))
                    continue
                with Subject(model, folder, 1) as subject:
                    report_alone(model, asyncio.run(recoveries(subject, options.kills)))
        if 2 in options.workers:
            print("\n| weights | gap | longest | usual |\n|---|---|---|---|")
            for model in models:
                with Subject(model, folder, 2) as subject:
                    report_gaps(model, asyncio.run(gaps(subject, options.kills)))


if __name__ == "__main__":
    main()
