"""Runs a whole server for tests, as ``mayfly serve`` starts it, with real processes: front end
(HTTP), workers (inference) and reaper (their supervisor)."""

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
"""Ports of each range that :func:`free_ports` may return."""


def _own_ports() -> Iterator[int]:
    """Returns the first ports of ranges of ten ports, for tests of this process alone; starts at a
    random range, so that other test suites on this machine rarely collide. All ports lie below the
    range from which the system picks for port 0, because seconds pass before a server binds the
    port that was chosen for it."""
    system = Path("/proc/sys/net/ipv4/ip_local_port_range")
    end = int(system.read_text().split()[0]) if system.exists() else 32_768
    suites = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    suite = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    if end < FIRST_PORT + 1000 * suites:
        end = 32_768  # the system's own range covers nearly all ports
    own = range(FIRST_PORT, end - EACH, EACH)[suite::suites]
    start = secrets.randbelow(len(own))
    return iter([*own[start:], *own[:start]])


_ports = _own_ports()


def free_port() -> int:
    """Returns a free TCP port that was not returned in this process before."""
    return free_ports(1)


def free_ports(count: int) -> int:
    """Finds ``count`` (ten at most) free TCP ports in a row, and returns the first."""
    assert count <= EACH
    for first in _ports:
        with contextlib.suppress(OSError):
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
            return first
    raise AssertionError(f"no {count} free ports in a row are left")


def wait_for(condition: Callable[[], T], what: str, deadline_s: float = DEADLINE_S) -> T:
    """Waits until ``condition`` returns a true value, and returns that value; fails after
    ``deadline_s`` seconds, naming ``what``. The checks become rarer with time, because most
    conditions send a request to the server under test and slow it down."""
    deadline = time.monotonic() + deadline_s
    pause_s = 0.02
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(pause_s)
        pause_s = min(1.1 * pause_s, 0.1)
    return value


class Server:
    """A running ``mayfly serve MODEL`` on a free port with a state folder of its own. Without a
    model, ``options`` name the models.

    The BLAS that MLX bundles is used, because only with this one the server promises bit-exact
    answers. ``environment`` is added to the test's environment. ``budgets`` are time limits, in
    seconds, of the reaper (the workers' supervisor) and of the front end that replace their
    defaults.
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
        """Returns the running processes of the server, also those whose parent has died since an
        earlier call."""
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self.process.pid)
            for process in (parent, *parent.children(recursive=True)):
                self._seen.setdefault(process.pid, process)
        return [p for p in self._seen.values() if alive(p)]

    def autopsies(self) -> list[dict[str, Any]]:
        """Returns the records that the server has written of its lost workers, oldest first."""
        path = self.state_dir / "autopsies.jsonl"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines()]

    def faults(self) -> list[dict[str, Any]]:
        """Runs ``mayfly faults --json`` for this server, and returns the parsed output."""
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
        """Runs ``mayfly recycle --all``: the server replaces all its workers gracefully."""
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
    """Returns the command line of ``mayfly``; with ``budgets``, that of a test program which runs
    ``mayfly`` with these time limits."""
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
    """Runs a separate front end (HTTP process) that uses the workers of all given servers; yields
    its URL."""
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
            front.kill()  # without effect if the process has ended
            front.wait()
