"""A whole server, as ``mayfly serve`` starts it: reaper, front end and workers, real processes."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import httpx
import openai
import psutil

from mayfly_reaper.paths import runtime_of
from support.processes import alive

T = TypeVar("T")
DEADLINE_S = 60.0
DOUBLES = Path(__file__).parent / "doubles"


FIRST_PORT = 10_000
EACH = 10
"""Ports for whoever asks for some."""


def _own_ports() -> Iterator[int]:
    """Returns the first of ten ports each, for this process's tests alone; from a random one on, so
    that other suites on this machine rarely come near. They lie below the ports that the system
    picks for port 0: between the choice of a port and a server's binding it are seconds."""
    system = Path("/proc/sys/net/ipv4/ip_local_port_range")
    end = int(system.read_text().split()[0]) if system.exists() else 32_768
    suites = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    suite = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    if end < FIRST_PORT + 1000 * suites:
        end = 32_768  # the system keeps nearly all of them to itself
    own = range(FIRST_PORT, end - EACH, EACH)[suite::suites]
    start = secrets.randbelow(len(own))
    return iter([*own[start:], *own[:start]])


_ports = _own_ports()


def free_port() -> int:
    """Returns a port that nobody uses, and that was not returned in this process before."""
    return free_ports(1)


def free_ports(count: int) -> int:
    """Returns the first of ``count`` (ten at most) free ports in a row."""
    assert count <= EACH
    for first in _ports:
        with contextlib.suppress(OSError):
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
            return first
    raise AssertionError(f"no {count} free ports in a row are left")


def wait_for(condition: Callable[[], T], what: str, deadline_s: float = DEADLINE_S) -> T:
    """Waits until a condition returns something true, and returns that. The checks become rarer:
    most conditions are a request to the server that is waited for, and would keep it from its
    work."""
    deadline = time.monotonic() + deadline_s
    pause_s = 0.02
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(pause_s)
        pause_s = min(1.1 * pause_s, 0.1)
    return value


class Server:
    """``mayfly serve MODEL`` on a free port with a state folder of its own; without a model, the
    options name the models.

    Exactness is promised with the BLAS that MLX bundles, so no other is preloaded. ``environment``
    is set on top of the test's own. ``budgets`` are time limits of the reaper and of the front end
    that differ from their defaults.
    """

    def __init__(
        self,
        model: Path | None,
        folder: Path,
        *options: str,
        environment: Mapping[str, str] | None = None,
        budgets: Mapping[str, float] | None = None,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.model = model.name if model else ""
        self.folder = model or folder
        self.state_dir = folder / "state"
        self._log = (folder / "serve.log").open("w")
        self.process = subprocess.Popen(
            [
                *_mayfly(budgets),
                *("serve", *([str(model)] if model else [])),
                *("--port", str(self.port), "--state-dir", str(self.state_dir)),
                *("--no-preload-blas", *options),
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **(environment or {})},
        )
        self.client = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S
        )
        self.http = httpx.Client(base_url=self.url, timeout=DEADLINE_S)
        self._seen: dict[int, psutil.Process] = {}

    def wait_ready(self, deadline_s: float = DEADLINE_S) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, f"the server has left:\n{self.log()}"
            with contextlib.suppress(httpx.TransportError):
                return self.http.get("/readyz").status_code == 200
            return False

        wait_for(ready, "a ready server", deadline_s)
        self.processes()

    def log(self) -> str:
        self._log.flush()
        return Path(self._log.name).read_text(errors="replace")

    def slots(self) -> list[dict[str, Any]]:
        answer = self.http.get("/mayfly/status").json()
        return [slot for node in answer["nodes"] for slot in node["slots"]]

    def slot(self) -> dict[str, Any]:
        [slot] = self.slots()
        return slot

    def node(self) -> dict[str, Any]:
        [node] = self.http.get("/mayfly/status").json()["nodes"]
        return dict(node)

    def processes(self) -> list[psutil.Process]:
        """Returns every running process of this server that was ever seen."""
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self.process.pid)
            for process in (parent, *parent.children(recursive=True)):
                self._seen.setdefault(process.pid, process)
        return [p for p in self._seen.values() if alive(p)]

    def autopsies(self) -> list[dict[str, Any]]:
        """Returns the records of lost workers, the oldest first."""
        path = self.state_dir / "autopsies.jsonl"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines()]

    def faults(self) -> list[dict[str, Any]]:
        """Returns the output of ``mayfly faults``."""
        command = ("faults", "--json", "--state-dir", str(self.state_dir))
        ran = subprocess.run([*_mayfly(None), *command], check=True, stdout=subprocess.PIPE)
        return list(json.loads(ran.stdout))

    def chat(self, text: str = "Tell me a story", **options: Any) -> Any:
        body = {"temperature": 0, "max_tokens": 8, **options}
        return self.client.chat.completions.create(
            model=self.model, messages=[{"role": "user", "content": text}], **body
        )

    def post(self, path: str, body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def recycle(self) -> None:
        """Runs ``mayfly recycle --all``."""
        command = ("recycle", "--all", "--state-dir", str(self.state_dir))
        subprocess.run([*_mayfly(None), *command], check=True, stdout=subprocess.DEVNULL)

    def stop(self, how: int = signal.SIGTERM) -> int:
        self.processes()
        self.process.send_signal(how)
        return self.process.wait(30)

    def close(self) -> None:
        self.client.close()
        self.http.close()
        if self.process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.stop()
        left = self.processes()
        for process in left:
            process.kill()
        self.process.wait()
        self._log.close()
        shutil.rmtree(runtime_of(self.state_dir).folder, ignore_errors=True)  # a killed reaper's
        assert not left, f"left running: {left}\n{self.log()}"


def _mayfly(budgets: Mapping[str, float] | None) -> list[str]:
    """Returns the ``mayfly`` command; with budgets, the tests' own program around it."""
    if budgets is None:
        return [sys.executable, "-m", "mayfly_cli"]
    return [sys.executable, str(DOUBLES / "run_mayfly.py"), json.dumps(dict(budgets))]


@contextlib.contextmanager
def serving(
    model: Path | None,
    folder: Path,
    *options: str,
    wait: bool = True,
    environment: Mapping[str, str] | None = None,
    budgets: Mapping[str, float] | None = None,
) -> Iterator[Server]:
    server = Server(model, folder, *options, environment=environment, budgets=budgets)
    try:
        if wait:
            server.wait_ready()
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def another_front_end(folder: Path, *servers: Server) -> Iterator[str]:
    """Runs a front end that is no child of these servers and knows all their workers; yields its
    URL."""
    url = f"http://127.0.0.1:{free_port()}"
    nodes = [("--node", runtime_of(server.state_dir).control) for server in servers]
    command = [sys.executable, "-m", "mayfly_server.front", *itertools.chain(*nodes)]
    command += ["--port", url.rpartition(":")[2]]
    with (folder / "front.log").open("w") as log:
        front = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def ready() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{url}/readyz").status_code == 200
        return False

    try:
        wait_for(ready, "the other front end")
        yield url
    finally:
        front.terminate()
        try:
            front.wait(20)
        finally:
            front.kill()  # which is nothing to one that has left
            front.wait()
