"""Measures how many streams a front end (the HTTP process) holds at once, and the memory and CPU
time of each.

Fake nodes, which compute nothing, give every stream ``--rate`` tokens per second. Each token says
when it was sent, so its lateness is known: the time from the node's sending to the client's
reading, the client's own slowness included. Clients keep their streams open until the end of a
round. Each round has more streams than the round before; the last has more streams than the front
end accepts connections. Prints a table. Client, nodes and front end share the
machine, so the CPU of each is printed. The limit of open files is raised as far as the system
allows.

    python bench/streams.py [--streams 256 512 1000 2000] [--rate 5] [--seconds 15]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import time
from collections import Counter
from dataclasses import dataclass, field

import psutil
import uvloop
from client import percentile
from fake_node import MODEL
from processes import MIB, Meter, as_many_files_as_allowed, memory

from fleet import fleet

NODES = 8
"""Number of fake nodes. Several, so that tokens of different streams come at different times, as
from real workers, each of which runs about 32 requests."""
AT_A_TIME = 64
"""Streams that the client opens at the same time."""
STAMP = re.compile(rb"@([0-9.]+);")
PATIENCE_S = 60.0


@dataclass
class Seen:
    """The client's observations: ``lateness`` of tokens and ``waits`` from connecting to the HTTP
    status line, in seconds. ``refused`` counts statuses other than 200, and streams that ended
    early."""

    open: int = 0
    counting: bool = False
    lateness: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)


async def stream(port: int, number: int, seen: Seen, opened: asyncio.Semaphore) -> None:
    body = {"model": MODEL, "stream": True, "max_tokens": 1 << 16}
    payload = json.dumps({**body, "messages": [{"role": "user", "content": str(number)}]}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(payload)
    async with opened:
        began = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + payload)
        status = (await reader.readline()).decode().strip()
        seen.waits.append(time.monotonic() - began)
        if " 200 " not in status:
            seen.refused[status or "closed without a word"] += 1
            writer.close()
            return
    seen.open += 1
    rest = b""
    try:
        while part := await reader.read(1 << 16):
            now = time.monotonic()
            whole, _, rest = (rest + part).rpartition(b"\n")
            if seen.counting:
                seen.lateness += [now - float(sent) for sent in STAMP.findall(whole)]
        seen.refused["ended"] += 1
    finally:
        seen.open -= 1
        writer.close()


async def measure(streams: int, options: argparse.Namespace) -> str:
    """Measures one round with the given number of streams; returns its row of the table."""
    rows = -(-streams * 2 // NODES)  # requests are hashed to nodes unevenly
    with fleet(NODES, rows, 1000 / options.rate, "--stamp") as (port, (front, *nodes)):
        before = memory(front).uss
        seen, opened = Seen(), asyncio.Semaphore(AT_A_TIME)
        tasks = [asyncio.create_task(stream(port, n, seen, opened)) for n in range(streams)]
        try:
            deadline = time.monotonic() + PATIENCE_S
            while seen.open + seen.refused.total() < streams and time.monotonic() < deadline:
                await asyncio.sleep(0.1)
            meter = Meter([front, psutil.Process(), *nodes])
            seen.counting, began = True, time.monotonic()
            await asyncio.sleep(options.seconds)
            seen.counting, took_s = False, time.monotonic() - began
            [of_front, of_client, *of_nodes] = meter.read()
            held, kib = seen.open, (memory(front).uss - before) * MIB / 1024
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    late = [percentile(seen.lateness, q) * 1000 for q in (0.5, 0.99, 1.0)]
    refused = ", ".join(f"{count}: {what}" for what, count in seen.refused.items()) or "-"
    return (
        f"| {streams} | {held} | {percentile(seen.waits, 0.5):.2f} / {max(seen.waits):.2f} "
        f"| {len(seen.lateness) / took_s:.0f} "
        f"| {late[0]:.1f} / {late[1]:.1f} / {late[2]:.0f} "
        f"| {kib / max(1, held):.0f} | {of_front.cores:.2f} "
        f"| {sum(each.cores for each in of_nodes):.2f} | {of_client.cores:.2f} | {refused} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[256, 512, 1000, 2000])
    parser.add_argument("--rate", type=float, default=5.0, help="tokens a second of each stream")
    parser.add_argument("--seconds", type=float, default=15.0)
    options = parser.parse_args()
    print(f"{as_many_files_as_allowed()} open files, {options.rate:g} tok/s each\n")
    print(
        "| streams | held | answered after s: p50 / most | tok/s | late ms: p50 / p99 / most "
        "| KiB each | front end's CPU | nodes' | client's | not held |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for streams in options.streams:
        print(uvloop.run(measure(streams, options)), flush=True)


if __name__ == "__main__":
    main()
