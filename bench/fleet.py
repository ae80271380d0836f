"""Measures the tokens per second that one front end (the HTTP process) relays from 1, 2 and 3 fake
nodes, which compute nothing, and its CPU time.

Rounds are interleaved (1 2 3 1 2 3 ...), and the result is the ratio within a round. Then the nodes
speed up until the front end falls behind; the tokens per second that it relays then are its limit.
Client, nodes and front end share the machine, so the CPU of each is printed. Prints Markdown
tables.

    python bench/fleet.py [--rounds 3] [--seconds 6] [--rows 16] [--step-ms 20] [--no-limit]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import uvloop
from fake_node import MODEL, TOKEN
from processes import cpu_s

HERE = Path(__file__).parent
TOKENS = 200
"""Tokens in the answer to each request."""
CLIENTS_PER_ROW = 1.5
"""Clients for each request that the nodes can run at once. More than 1, so that every node always
has a request waiting: requests are not spread evenly, and a node may get a quarter more than its
share."""
LIMIT_ROWS = 64
LIMIT_STEPS_MS = (40.0, 20.0, 15.0, 10.0, 7.5, 5.0)


@dataclass(frozen=True)
class Measured:
    """A round's figures: ``tokens`` per second that the clients got, ``offered``, tokens per second
    that the nodes could produce, and CPU seconds per second of front end, nodes and client."""

    tokens: float
    offered: float
    front: float
    nodes: float
    client: float
    ttft_ms: float


class Client:
    """A load client that counts the tokens of its streams without parsing them, so that it takes
    little CPU time from the front end that it measures."""

    def __init__(self, port: int) -> None:
        body = {
            "model": MODEL,
            "stream": True,
            "max_tokens": TOKENS,
            "messages": [{"role": "user", "content": "x"}],
        }
        self._port = port
        self._body = body
        self._mark = TOKEN.encode()
        self.tokens = 0
        self.ttfts: list[float] = []

    async def again_and_again(self, name: str) -> None:
        number = 0
        while True:
            number += 1
            await self._one(f"{name}-{number}")

    async def _one(self, conversation: str) -> None:
        body = self._body | {"messages": [{"role": "user", "content": conversation}]}
        payload = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        began = time.perf_counter()
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
            % (len(payload), payload)
        )
        got = 0
        try:
            while part := await reader.read(1 << 16):
                if not got and (found := part.count(self._mark)):
                    self.ttfts.append(time.perf_counter() - began)
                    got = found
                    self.tokens += found
                else:
                    found = part.count(self._mark)
                    got += found
                    self.tokens += found
        finally:
            writer.close()
        if got != TOKENS:
            raise RuntimeError(f"{got} tokens of {TOKENS} came")


@contextlib.contextmanager
def fleet(
    nodes: int, rows: int, step_ms: float, *options: object
) -> Iterator[tuple[int, list[psutil.Process]]]:
    """Runs a front end over fake nodes that take their steps in turn. Yields the front end's port,
    and the processes, the front end first. ``options`` go to every fake node's command line."""
    with contextlib.ExitStack() as stack:
        folders = [
            stack.enter_context(tempfile.TemporaryDirectory(prefix="mayfly-bench-"))
            for _ in range(nodes)
        ]
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "mayfly_server.front", "--port", port]
        for folder in folders:
            command += ["--node", f"ipc://{folder}/node.ipc"]
        # Started first, so ended last: to the front end, a node that ends is a fault.
        started = [stack.enter_context(running(command, stderr=subprocess.DEVNULL))]
        for number, folder in enumerate(folders):
            command = [sys.executable, HERE / "fake_node.py", folder, f"node-{number}"]
            command += ["--rows", rows, "--step-ms", step_ms]
            command += ["--phase-ms", step_ms * number / nodes, *options]
            started.append(stack.enter_context(running(command)))
        wait_ready(port, nodes)
        yield port, started


@contextlib.contextmanager
def running(command: list[object], stderr: int | None = None) -> Iterator[psutil.Process]:
    process = subprocess.Popen(list(map(str, command)), stderr=stderr)
    try:
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


def wait_ready(port: int, nodes: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            url = f"http://127.0.0.1:{port}/mayfly/status"
            with urllib.request.urlopen(url, timeout=5) as response:
                if len(json.load(response)["nodes"]) == nodes:
                    with urllib.request.urlopen(url.replace("mayfly/status", "readyz"), timeout=5):
                        return
        time.sleep(0.1)
    raise RuntimeError("the front end does not get ready")


async def measure(nodes: int, rows: int, step_ms: float, seconds: float) -> Measured:
    """Measures one round: fills all ``rows`` of every node for two seconds, then counts tokens and
    CPU time for ``seconds``."""
    with fleet(nodes, rows, step_ms) as (port, (front, *fakes)):
        client = Client(port)
        own = psutil.Process(os.getpid())
        tasks = [
            asyncio.create_task(client.again_and_again(str(number)))
            for number in range(round(CLIENTS_PER_ROW * nodes * rows))
        ]
        try:
            await asyncio.sleep(2.0)
            everyone = [front, own, *fakes]
            before, tokens, began = [cpu_s(p) for p in everyone], client.tokens, time.monotonic()
            client.ttfts.clear()
            await asyncio.sleep(seconds)
            took = time.monotonic() - began
            spent = [(cpu_s(p) - then) / took for p, then in zip(everyone, before, strict=True)]
            for task in tasks:
                if task.done():
                    await task  # raises the client's error
            return Measured(
                tokens=(client.tokens - tokens) / took,
                offered=nodes * rows * 1000 / step_ms,
                front=spent[0],
                client=spent[1],
                nodes=sum(spent[2:]),
                ttft_ms=statistics.median(client.ttfts or [float("nan")]) * 1000,
            )
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def scaling(options: argparse.Namespace) -> None:
    rounds: list[dict[int, Measured]] = []
    for _ in range(options.rounds):
        rounds.append({})
        for nodes in (1, 2, 3):
            rounds[-1][nodes] = uvloop.run(
                measure(nodes, options.rows, options.step_ms, options.seconds)
            )
    print("| nodes | tok/s | of the offered | / 1 node | front end's CPU | nodes' | client's |")
    print("|---|---|---|---|---|---|---|")
    for nodes in (1, 2, 3):
        seen = [each[nodes] for each in rounds]
        ratios = [each[nodes].tokens / each[1].tokens for each in rounds]
        print(
            f"| {nodes} | {median(seen, 'tokens'):.0f} "
            f"| {statistics.median(m.tokens / m.offered for m in seen):.2f} "
            f"| {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}) "
            f"| {median(seen, 'front'):.2f} | {median(seen, 'nodes'):.2f} "
            f"| {median(seen, 'client'):.2f} |",
            flush=True,
        )


def limit(options: argparse.Namespace) -> None:
    print(f"\n{3 * LIMIT_ROWS} rows of 3 nodes:\n")
    print(
        "| a step every | offered tok/s | passed on | front end's CPU | tok per second of it",
        end="",
    )
    print(" | nodes' CPU | client's CPU |")
    print("|---|---|---|---|---|---|---|")
    best = 0.0
    for step_ms in LIMIT_STEPS_MS:
        now = uvloop.run(measure(3, LIMIT_ROWS, step_ms, options.seconds))
        part = now.tokens / now.offered
        print(
            f"| {step_ms:g} ms | {now.offered:.0f} | {now.tokens:.0f} ({part:.2f}) "
            f"| {now.front:.2f} | {now.tokens / now.front:.0f} "
            f"| {now.nodes:.2f} | {now.client:.2f} |",
            flush=True,
        )
        if now.tokens < best:
            break  # the front end is at its limit: faster nodes only slow it down
        best = now.tokens


def median(seen: list[Measured], name: str) -> float:
    return float(statistics.median(getattr(measured, name) for measured in seen))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--no-limit", action="store_true", help="only the scaling")
    options = parser.parse_args()
    if options.rounds:
        scaling(options)
    if not options.no_limit:
        limit(options)


if __name__ == "__main__":
    main()
