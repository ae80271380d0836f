"""Helpers for tests that talk to a front end (the HTTP process) over raw sockets, byte by byte, and
test its limits of time, size and memory."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import psutil

from mayfly_server.settings import ConnectionLimits
from support.running_front import RunningFront

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGE = [{"role": "user", "content": "hi"}]
HELLO: dict[str, Any] = {"messages": MESSAGE}
SECRET, ADMIN = "unique-key-4711-of-a-client", "unique-key-4712-of-an-admin"
MIB = 1 << 20
LIMITS = ConnectionLimits(
    head_wait_s=3.0, body_wait_s=1.0, body_bytes_per_s=1e6, slow_reader_s=1.0, linger_s=1.0
)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def connect(front: RunningFront, timeout: float = 15.0) -> socket.socket:
    return socket.create_connection(("127.0.0.1", front.port), timeout=timeout)


def read_to_end(connection: socket.socket) -> bytes:
    """Returns all bytes that come before the server closes the connection."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            received += part
    return received


def status_of_raw(front: RunningFront, text: str) -> int:
    """Sends the text of an HTTP request unchanged, and returns the HTTP status of the answer."""
    with connect(front) as connection:
        connection.sendall(text.encode())
        line = connection.makefile("rb").readline()
    return int(line.split()[1])


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


def assert_probe_answers_during(front: RunningFront, during: Callable[[], Any]) -> None:
    """Checks that /livez answers within 0.1 s (median) while ``during`` runs. The median counts,
    because the machine may be busy with other things."""
    done = threading.Event()
    waits: list[float] = []

    def probe() -> None:
        with httpx.Client(base_url=front.url) as client:
            while len(waits) < 3 or not done.is_set():
                began = time.monotonic()
                assert client.get("/livez").status_code == 200
                waits.append(time.monotonic() - began)

    prober = threading.Thread(target=probe)
    prober.start()
    try:
        during()
    finally:
        done.set()
        prober.join()
    assert sorted(waits)[len(waits) // 2] < 0.1


class MemoryGrowth:
    """A context manager that measures, in ``peak``, by how many bytes the memory (RSS) of the test
    process grows; the front end runs in this process."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._before = self._process.memory_info().rss
        self.peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            self.peak = max(self.peak, self._process.memory_info().rss - self._before)

    def __enter__(self) -> MemoryGrowth:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()
