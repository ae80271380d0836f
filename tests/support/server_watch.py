"""Records, while a test disturbs a running server, the answers of its /health and the status
messages (rosters) of its node."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from types import TracebackType

import httpx
import zmq

from mayfly_protocol.codec import rosters
from mayfly_protocol.roster import ROSTER_TOPIC, Roster
from mayfly_reaper.paths import runtime_of
from support.server import Server

LOOK_MS = 20


@dataclass(frozen=True)
class Probe:
    """One answer of ``/health``: time of the request (monotonic clock, seconds), duration, HTTP
    status, and Retry-After."""

    asked_at: float
    took_s: float
    status: int
    retry_after: str | None


class ServerWatch:
    """A context manager that watches a server from two threads. At its end ``rosters`` holds all
    status messages of the node with their times, and ``probes`` all answers of /health."""

    def __init__(self, server: Server) -> None:
        self.rosters: list[tuple[float, Roster]] = []
        self.probes: list[Probe] = []
        self._url = f"{server.url}/health"
        self._node = runtime_of(server.state_dir).roster
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._watch_node),
            threading.Thread(target=self._watch_health),
        ]

    def __enter__(self) -> ServerWatch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    @property
    def outage(self) -> tuple[float, float]:
        """The times (monotonic clock, seconds) of the first status message without a READY worker,
        and of the next message with a READY worker (infinity if none came)."""
        serving = [
            (at, any(slot.state == "ready" for slot in roster.slots)) for at, roster in self.rosters
        ]
        began = next(at for at, ready in serving if not ready)
        return began, next((at for at, ready in serving if ready and at > began), float("inf"))

    def _watch_node(self) -> None:
        with zmq.Context() as context, context.socket(zmq.SUB) as node:
            node.linger = 0
            node.subscribe(ROSTER_TOPIC)
            node.connect(self._node)
            while not self._over.is_set():
                if node.poll(LOOK_MS):
                    roster = rosters.decode(node.recv_multipart()[1])
                    self.rosters.append((time.monotonic(), roster))

    def _watch_health(self) -> None:
        with httpx.Client() as client:
            while not self._over.wait(LOOK_MS / 1000):
                with contextlib.suppress(httpx.TransportError):
                    asked_at = time.monotonic()
                    answer = client.get(self._url)
                    took_s = time.monotonic() - asked_at
                    retry_after = answer.headers.get("retry-after")
                    self.probes.append(Probe(asked_at, took_s, answer.status_code, retry_after))
