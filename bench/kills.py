"""Measures how long the front end (HTTP process) still sends requests to a worker process that was
killed.

Serves a model with one worker, kills the worker with SIGKILL again and again, and prints how many
milliseconds after the kill (median, 99th percentile, longest)

* the operating system has ended the process,
* the reaper (the workers' supervisor) no longer reports the worker READY in its roster, the status
  message for front ends,
* the front end answers /health with 503, because it has no worker left to send a request to.

    python bench/kills.py MODEL_FOLDER --kills 30        (on Linux)

/health is asked over one open connection, without a pause, so the last figure includes up to two
round trips of this probe; a round trip's duration is printed too.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import os
import select
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq
from servers import Mayfly

from mayfly_protocol.codec import rosters
from mayfly_protocol.roster import ROSTER_TOPIC
from mayfly_reaper.paths import runtime_of

PATIENCE_S = 60.0


class Probe:
    """Asks a server's ``/health`` and ``/mayfly/status`` over one connection, and times each
    ``/health``."""

    def __init__(self, port: int) -> None:
        self._http = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        self.round_trips: list[float] = []

    def health(self) -> int:
        began = time.monotonic()
        status = self._get("/health")[0]
        self.round_trips.append(time.monotonic() - began)
        return status

    def slots(self) -> list[dict[str, Any]]:
        nodes = json.loads(self._get("/mayfly/status")[1])["nodes"]
        return [slot for node in nodes for slot in node["slots"]]

    def _get(self, path: str) -> tuple[int, bytes]:
        self._http.request("GET", path)
        answer = self._http.getresponse()
        return answer.status, answer.read()


def ready(probe: Probe, after: int) -> dict[str, Any]:
    """Waits until a worker with an incarnation number above ``after`` (a later process) is READY
    and /health is 200; returns its entry in the status."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for slot in probe.slots():
            if slot["state"] == "ready" and slot["incarnation"] > after and probe.health() == 200:
                return slot
        time.sleep(0.05)
    raise SystemExit("no worker became ready")


class Stopwatch(threading.Thread):
    """A thread that notes the time ``at`` which ``wait`` returns. Start the thread before the event
    that ``wait`` waits for can happen."""

    def __init__(self, wait: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self._wait = wait
        self.at = math.nan

    def run(self) -> None:
        self._wait()
        self.at = time.monotonic()


def ended(pid: int) -> Callable[[], None]:
    """A function that waits until the process has ended; works for any process of the user, child
    or not."""
    watched = os.pidfd_open(pid)

    def wait() -> None:
        select.select([watched], [], [])
        os.close(watched)

    return wait


def off_the_roster(node: zmq.Socket[Any]) -> Callable[[], None]:
    """A function that waits for the node's first roster (status message) in which no worker is
    READY. ``node`` is a socket that is subscribed to the rosters."""
    while node.poll(0):
        node.recv_multipart()

    def wait() -> None:
        while True:
            roster = rosters.decode(node.recv_multipart()[1])
            if not any(slot.state == "ready" for slot in roster.slots):
                return

    return wait


def off_the_choices(probe: Probe) -> Callable[[], None]:
    """A function that waits until /health is not 200: the front end has no worker left to send
    requests to."""

    def wait() -> None:
        while probe.health() == 200:
            pass

    return wait


def kill(pid: int, watches: list[Stopwatch]) -> list[float]:
    """Starts the stopwatches and kills the process; returns the milliseconds from the kill to each
    stopwatch's event."""
    for watch in watches:
        watch.start()
    time.sleep(0.2)  # until all of them wait
    killed_at = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    for watch in watches:
        watch.join(PATIENCE_S)
    return [(watch.at - killed_at) * 1e3 for watch in watches]


def p99(values: list[float]) -> float:
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a model folder")
    parser.add_argument("--kills", type=int, default=30)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, zmq.Context() as context:
        server = Mayfly(args.model, Path(folder))
        try:
            with context.socket(zmq.SUB) as node:
                node.subscribe(ROSTER_TOPIC)
                node.connect(runtime_of(server.state).roster)
                report(measure(args.kills, Probe(server.port), node))
        finally:
            server.close()


def measure(kills: int, probe: Probe, node: zmq.Socket[Any]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {
        name: [] for name in ("process ended", "off the roster", "503", "(one probe)")
    }
    last = 0
    for _ in range(kills):
        slot = ready(probe, last)
        last = slot["incarnation"]
        probe.round_trips.clear()
        watches = [
            Stopwatch(ended(slot["pid"])),
            Stopwatch(off_the_roster(node)),
            Stopwatch(off_the_choices(probe)),
        ]
        took = kill(slot["pid"], watches)
        took.append(statistics.median(probe.round_trips) * 1e3)
        for values, value in zip(found.values(), took, strict=True):
            values.append(value)
    return found


def report(found: dict[str, list[float]]) -> None:
    print("| SIGKILL to | median ms | p99 ms | longest ms |\n|---|---|---|---|")
    for what, values in found.items():
        print(f"| {what} | {statistics.median(values):.1f} | {p99(values):.1f} "
              f"| {max(values):.1f} |")  # fmt: skip


if __name__ == "__main__":
    main()
