"""Measures what Mayfly itself costs: memory and CPU of front end (HTTP), worker (inference) and
reaper (supervisor), idle and at load.

The server is ``mayfly serve`` with a tiny random-weight model, so that next to nothing of the
memory and CPU is the model's. The server idles, then clients stream without a pause, then the
server idles again. Prints a table. The clients run on the same machine; their CPU is printed too.

    python bench/cost.py [--concurrency 8 32] [--idle-s 60] [--seconds 20] [--max-tokens 64]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from client import chat, stream
from processes import Meter, memory, roles
from servers import Mayfly

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support.models import tiny

MODEL = "tiny"
WARM_UP_S = 3.0


@contextlib.contextmanager
def serving(folder: Path, *options: object) -> Iterator[Mayfly]:
    """Runs ``mayfly serve`` with the tiny model; ``options`` are added to its default options."""
    server = Mayfly(tiny.build(folder / MODEL), folder, *options)
    try:
        yield server
    finally:
        server.close()


@dataclass
class Load:
    tokens: int = 0
    requests: int = 0


@contextlib.asynccontextmanager
async def load(port: int, concurrency: int, max_tokens: int) -> AsyncIterator[Load]:
    """Runs ``concurrency`` clients, each of which streams one answer after the other, until the
    context ends; yields the running count of their tokens and requests."""
    so_far = Load()

    async def client(name: int) -> None:
        for number in itertools.count():
            timing = await stream("127.0.0.1", port, ask(f"{name}-{number}", max_tokens))
            so_far.tokens += timing.tokens
            so_far.requests += 1

    async with asyncio.TaskGroup() as group:
        clients = [group.create_task(client(number)) for number in range(concurrency)]
        yield so_far
        for each in clients:
            each.cancel()


def ask(what: str, max_tokens: int) -> dict[str, object]:
    text = f"{what}: alpha beta gamma delta stone river cloud number"
    return chat(MODEL, text, max_tokens)


@dataclass(frozen=True)
class Watched:
    """The processes of a server by role, metered from the object's making on; with ``clients``
    also this process, in which the load clients run."""

    processes: dict[str, psutil.Process]
    meter: Meter

    @classmethod
    def of(cls, server: int, *, clients: bool) -> Watched:
        processes = {role: found[0] for role, found in roles(server).items()}
        if clients:
            processes["(clients)"] = psutil.Process()
        return cls(processes, Meter(list(processes.values())))

    def report(self, state: str, tokens: str) -> None:
        spent = self.meter.read()
        for (role, process), each in zip(self.processes.items(), spent, strict=True):
            held = memory(process)
            print(
                f"| {state} | {role} | {held.uss:.0f} | {held.rss:.0f} | {each.cores:.4f} "
                f"| {each.wake_ups:.0f} | {tokens} |",
                flush=True,
            )


def idle(state: str, server: int, seconds: float) -> None:
    """Measures the server during ``seconds`` without a request, after as many seconds of rest."""
    time.sleep(seconds)
    watched = Watched.of(server, clients=False)
    time.sleep(seconds)
    watched.report(state, "-")


async def at_load(server: Mayfly, concurrency: int, options: argparse.Namespace) -> None:
    async with load(server.port, concurrency, options.max_tokens) as so_far:
        await asyncio.sleep(WARM_UP_S)
        watched = Watched.of(server.pid, clients=True)
        before, began = so_far.tokens, time.monotonic()
        await asyncio.sleep(options.seconds)
        speed = (so_far.tokens - before) / (time.monotonic() - began)
        watched.report(f"c = {concurrency}", f"{speed:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--idle-s", type=float, default=60.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="mayfly-bench-") as folder,
        serving(Path(folder)) as server,
    ):
        print("| state | process | USS MiB | RSS MiB | cores | wake-ups / s | tok/s |")
        print("|---|---|---|---|---|---|---|")
        idle("idle, new", server.pid, options.idle_s)
        for concurrency in options.concurrency:
            asyncio.run(at_load(server, concurrency, options))
        idle("idle, after that", server.pid, options.idle_s)


if __name__ == "__main__":
    main()
