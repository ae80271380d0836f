"""Measures whether the front end (HTTP) and the reaper (supervisor of the workers) leak: their
memory and open files after thousands of short requests.

The server is ``mayfly serve`` with its default options and a tiny random-weight model; its workers
are replaced from time to time as usual. After each number of requests in ``--stops``, the clients
pause for some seconds before memory and files are measured. Prints a table.

    python bench/growth.py [--stops 0 2000 5000 10000 15000 20000] [--concurrency 16]
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

from client import load
from cost import ask, serving
from processes import as_many_files_as_allowed, memory, roles

QUIET_S = 5.0
"""Seconds between the last answer and the measurement, in which sockets close and buffers are
freed."""


def report(server: int, requests: int, seconds: float) -> None:
    time.sleep(QUIET_S)
    held = []
    for found in roles(server).values():
        # There are two workers while a worker's successor loads; the older one is measured.
        process = min(found, key=lambda each: each.create_time())
        now = memory(process)
        held.append(f"{now.uss:.1f} | {now.rss:.1f} | {process.num_fds()}")
    print(f"| {requests} | {seconds:.0f} | {' | '.join(held)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    stops = [0, 2_000, 5_000, 10_000, 15_000, 20_000]
    parser.add_argument("--stops", type=int, nargs="+", default=stops, help="in requests")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=4)
    options = parser.parse_args()
    as_many_files_as_allowed()
    with (
        tempfile.TemporaryDirectory(prefix="mayfly-bench-") as folder,
        serving(Path(folder)) as server,
    ):
        names = [f"{role}: USS MiB | RSS MiB | files" for role in roles(server.pid)]
        print(f"| requests | s | {' | '.join(names)} |\n|{'---|' * (2 + 3 * len(names))}")
        done, spent = 0, 0.0
        for stop in options.stops:
            bodies = [ask(str(number), options.max_tokens) for number in range(done, stop)]
            spent += asyncio.run(
                load("127.0.0.1", server.port, bodies, options.concurrency)
            ).seconds
            done = stop
            report(server.pid, done, spent)


if __name__ == "__main__":
    main()
