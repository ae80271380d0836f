"""Runs a front end (the HTTP process of Mayfly) in a thread of the test process."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Collection, Sequence
from typing import Any

import httpx
import uvloop

from mayfly_server.api.dependencies import Front
from mayfly_server.app import create_app
from mayfly_server.http.api_keys import Key
from mayfly_server.settings import FrontSettings
from mayfly_server.uvicorn_server import FrontServer

PATIENCE_S = 30.0


class RunningFront:
    """A context manager that runs a front end in a thread, on a free port. Entering waits for a
    ready worker or, with ``ready`` false, only until the front end listens.

    ``send_buffer`` limits the bytes that the system buffers for a client that does not read.
    ``settings`` are fields of FrontSettings.
    """

    def __init__(
        self,
        *nodes: str,
        ready: bool = True,
        keys: Sequence[Key] = (),
        send_buffer: int | None = None,
        **settings: Any,
    ) -> None:
        self._settings = FrontSettings(
            nodes=nodes, **({"grace_s": 1.0, "notice_s": 0.0} | settings)
        )
        self.app = create_app(self._settings, keys)
        self._server = FrontServer(self.app, self._settings)
        self._socket = socket.create_server(("127.0.0.1", 0))
        if send_buffer:  # Linux hands it on to each connection
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        self._wait_ready = ready
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=self.url, timeout=PATIENCE_S)
        self._thread = threading.Thread(target=self._run, name="front end", daemon=True)

    @property
    def front(self) -> Front:
        front: Front = self.app.state.front
        return front

    @property
    def connections(self) -> Collection[Any]:
        """The front end's open HTTP connections."""
        return self._server.server_state.connections

    def __enter__(self) -> RunningFront:
        self._thread.start()
        path = "/readyz" if self._wait_ready else "/livez"
        self.wait(lambda: self._server.started and self._answers(path))
        return self

    def __exit__(self, *exception: object) -> None:
        self.client.close()
        self.stop()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def stop(self) -> None:
        """Makes the front end shut down, as SIGTERM does; does not wait."""
        self._server.should_exit = True

    def wait_workers(self, count: int) -> None:
        """Waits until at least ``count`` workers can take a request from this front end."""
        self.wait(lambda: self.front.fleet.ready_workers() >= count)

    def metric(self, name: str) -> float:
        """Returns the sum of the samples in /metrics whose lines begin with ``name``."""
        lines = self.client.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    @staticmethod
    def wait(condition: Any, patience_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + patience_s
        while not condition():
            assert time.monotonic() < deadline, "it did not happen in time"
            time.sleep(0.01)

    def _answers(self, path: str) -> bool:
        try:
            return self.client.get(path).status_code == 200
        except httpx.TransportError:
            return False

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._server.serve(sockets=[self._socket]))
