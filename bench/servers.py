"""Starts, watches and stops servers as processes: Mayfly, and the MLX servers that benchmarks
compare it with."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from client import Round, load

from mayfly_cli.drill.workers import PoolWorker, workers_of

START_S = 300.0
RESTART_S = 0.1
"""Seconds between a server's end and its restart; systemd's default (RestartSec)."""

Command = Callable[[Path, Path, int, int], list[object]]
"""A function that makes a server's command line from its virtual environment, the model, the port,
and the number of sequences that decode together."""

PEERS: dict[str, Command] = {
    "mlx_lm.server": lambda venv, model, port, rows: [
        venv / "bin/python", "-m", "mlx_lm", "server", "--model", model, "--port", port,
        "--decode-concurrency", rows, "--prompt-concurrency", 8, "--trust-remote-code",
    ],
    "vllm-mlx": lambda venv, model, port, rows: [
        venv / "bin/vllm-mlx", "serve", model, "--port", port, "--continuous-batching",
        "--completion-batch-size", rows, "--trust-remote-code",
    ],
    "rapid-mlx": lambda venv, model, port, rows: [
        venv / "bin/rapid-mlx", "serve", model, "--port", port, "--completion-batch-size", rows,
    ],
    "mlx-openai-server": lambda venv, model, port, rows: [
        venv / "bin/mlx-openai-server", "launch", "--model-path", model, "--model-type", "lm",
        "--port", port, "--no-log-file", "--decode-concurrency", rows, "--trust-remote-code",
    ],
}  # fmt: skip
"""Command lines of the servers that Mayfly is compared with, as their users start them: with
defaults, and with batching where it is optional. By default each decodes 32 sequences together."""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def get(url: str) -> bytes | None:
    """The body at a URL, or None if there is no answer within 5 s or its status is not 200."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bytes(response.read()) if response.status == 200 else None
    except OSError:
        return None


class Server:
    """A running server with all processes that it starts; ``round`` sends it load over HTTP.

    A ``restarted`` server is started again whenever it has ended, as by systemd's
    ``Restart=always``.
    """

    def __init__(
        self, command: list[object], port: int, log: Path, model: str, *, restarted: bool = False
    ) -> None:
        log.parent.mkdir(exist_ok=True)
        self.port = port
        self.model = model
        self._command = [str(part) for part in command]
        self._log = log.open("w")
        self._stopping = False
        self._starting = threading.Lock()
        self._seen: set[psutil.Process] = set()
        self._process = self._start()
        self._supervisor = threading.Thread(target=self._restart, daemon=True)
        if restarted:
            self._supervisor.start()
        try:
            self.wait_whole()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command, stdout=self._log, stderr=self._log, stdin=subprocess.DEVNULL
        )

    def _restart(self) -> None:
        while True:
            self._process.wait()
            time.sleep(RESTART_S)
            with self._starting:
                if self._stopping:
                    return
                self._process = self._start()

    def whole(self) -> bool:
        """True if the server reports that it serves at full capacity; for a server without workers,
        if /health is 200."""
        return get(f"http://127.0.0.1:{self.port}/health") is not None

    def wait_whole(self) -> None:
        """Waits until the server is at full capacity. Raises RuntimeError after 300 s, or if the
        server has ended and is not restarted."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self.whole():
                return
            if self._process.poll() is not None and not self._supervisor.is_alive():
                break
            time.sleep(0.2)
        text = Path(self._log.name).read_text(errors="replace")
        raise RuntimeError(f"{' '.join(self._command)} did not come up:\n{text[-2000:]}")

    def processes(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self._process.pid)
            self._seen.update([parent, *parent.children(recursive=True)])
        return [process for process in self._seen if process.is_running()]

    def computing(self) -> int:
        """The id of the process that runs inference: the one with the most memory."""
        return int(max(self.processes(), key=lambda process: process.memory_info().rss).pid)

    def round(self, bodies: list[dict[str, object]], concurrency: int) -> Round:
        return asyncio.run(load("127.0.0.1", self.port, bodies, concurrency))

    def stop(self, patience_s: float = 20.0) -> float | None:
        """Sends SIGTERM. Returns the seconds until the server has ended, or None if that takes more
        than ``patience_s`` seconds."""
        with self._starting:
            self._stopping = True
        self.processes()
        began = time.monotonic()
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
            return time.monotonic() - began
        return None

    def close(self) -> None:
        """Stops the server, and kills all its processes that are left."""
        if not self._log.closed:
            self.stop()
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        self._log.close()


class Mayfly(Server):
    """A running ``mayfly serve`` with its state and log in the given folder."""

    def __init__(self, model: Path, folder: Path, *options: object) -> None:
        port = free_port()
        self.state = folder / "state"
        command = [sys.executable, "-m", "mayfly_cli", "serve", model, "--port", port,
                   "--state-dir", self.state, *options]  # fmt: skip
        super().__init__(command, port, folder / "mayfly.log", model.name)

    def workers(self) -> list[PoolWorker]:
        status: dict[str, Any] = json.loads(
            get(f"http://127.0.0.1:{self.port}/mayfly/status") or b'{"nodes": []}'
        )
        return workers_of(status)

    def whole(self) -> bool:
        found = self.workers()
        return bool(found) and all(worker.ready for worker in found)

    def computing(self) -> int:
        return next(worker.pid for worker in self.workers() if worker.ready)


def peer(
    name: str, venv: Path, model: Path, folder: Path, *, rows: int = 32, restarted: bool = False
) -> Server:
    """Starts another MLX server than Mayfly, one of PEERS. Its home is ``folder``, because some
    servers store results of their computations at home for their next start."""
    port = free_port()
    home = ["env", f"HOME={folder}", "RAPID_MLX_TRUST_REMOTE_CODE=1"]
    command = [*home, *PEERS[name](venv, model, port, rows)]
    return Server(command, port, folder / f"{name}.log", str(model), restarted=restarted)
