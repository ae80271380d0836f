"""A fleet for tests: several machines with worker nodes and a gateway with front ends (the HTTP
processes), each machine a Linux network namespace; and clients that read every stream to its
end."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import psutil

from mayfly_protocol.transport.keys import (
    KeyPair,
    make_pair,
    read_pair,
    trusted_file,
    write_trusted,
)
from mayfly_reaper.paths import runtime_of
from support.network_namespaces import Machine, Network, enter

DEADLINE_S = 180.0
CONTROL_PORT = 7700
TOKENS = {
    f"Tell me about the {bird} of the lake": count
    for bird, count in {"heron": 500, "grebe": 650, "teal": 800, "coot": 950}.items()
}
"""Number of tokens that is asked for with each prompt. The numbers differ, so that the clients'
requests do not all end at the same time."""
PROMPTS = tuple(TOKENS)


def wait_for(condition: Callable[[], bool], what: str, patience_s: float = DEADLINE_S) -> None:
    """Waits until a condition holds; fails after ``patience_s`` seconds, naming ``what``. Checks
    only twice a second, to leave the CPU to the processes under test."""
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, f"no sign of {what}"
        time.sleep(0.5)


class MachineProcess:
    """A running ``mayfly`` command on a machine (network namespace) of the fleet."""

    def __init__(self, machine: Machine, folder: Path, *arguments: str) -> None:
        self._log = folder / f"{arguments[0]}.log"
        self.machine = machine
        with self._log.open("a") as log:
            command = [sys.executable, "-m", "mayfly_cli", *arguments]
            self.process = machine.start(command, log)

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def children(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def stop(self) -> None:
        """Ends the command with SIGTERM and waits; fails if its exit status is not 0."""
        self.process.terminate()
        assert self.process.wait(DEADLINE_S) == 0, self.log()

    def kill(self) -> None:
        """Kills the command and all processes that it started, as if its machine lost power."""
        for process in (*self.children(), psutil.Process(self.process.pid)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(DEADLINE_S)


class FleetNode:
    """A running ``mayfly node``, which serves a model with its workers, on a machine of its own."""

    def __init__(self, machine: Machine, folder: Path, model: Path, front: KeyPair) -> None:
        self.machine = machine
        self.folder = folder
        self._model = model
        state = folder / "state"
        self.pair = read_pair(state) or make_pair(state)
        write_trusted(trusted_file(state), {front.public: "front"})
        self.running = self.start()

    @property
    def address(self) -> str:
        return f"tcp://{self.pair.public}@{self.machine.address}:{CONTROL_PORT}"

    def start(self) -> MachineProcess:
        self.running = MachineProcess(
            self.machine,
            self.folder,
            *("node", str(self._model), "--state-dir", str(self.folder / "state")),
            *("--control-host", self.machine.address, "--control-port", str(CONTROL_PORT)),
            *("--worker-ports", "7710-7719", "--no-preload-blas"),
        )
        return self.running


class FleetFront:
    """A running ``mayfly front``, the HTTP front end of all nodes, on the gateway machine. The
    test's clients run on the gateway too."""

    def __init__(self, machine: Machine, folder: Path, number: int, nodes: Sequence[str]) -> None:
        self.number = number
        self.machine = machine
        self.port = 8000 + number
        self._folder = folder
        self._nodes = [part for node in nodes for part in ("--node", node)]
        self.running = self.start()

    def start(self) -> MachineProcess:
        self.running = MachineProcess(
            self.machine,
            self._folder,
            *("front", *self._nodes, "--port", str(self.port)),
            *("--state-dir", str(self._folder / "state"), "--stop-grace", "60"),
        )
        return self.running

    def get(self, path: str) -> tuple[int, bytes]:
        """Sends a GET to the front end; returns status and body. Raises OSError if the front end
        does not answer."""
        return self.machine.do(partial(_get, self.port, path))

    def ready(self) -> bool:
        with contextlib.suppress(OSError, HTTPException):
            return self.get("/readyz")[0] == 200
        return False

    def nodes(self) -> dict[str, dict[str, Any]]:
        """Returns the status of each node as this front end knows it, by the node's name."""
        return {node["node"]: node for node in json.loads(self.get("/mayfly/status")[1])["nodes"]}

    def usable(self) -> set[str]:
        """Returns the names of the nodes that report to this front end and have a ready worker."""
        return {
            name
            for name, node in self.nodes().items()
            if not node["silent"] and any(slot["state"] == "ready" for slot in node["slots"])
        }

    def metric(self, beginning: str) -> float:
        lines = self.get("/metrics")[1].decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(beginning))


class Fleet:
    """A fleet of ``count`` nodes and three front ends that use all nodes. ``expected`` maps each
    prompt to the answer of the undisturbed fleet."""

    def __init__(self, network: Network, model: Path, folder: Path, count: int = 3) -> None:
        self.model = model
        self.folder = folder
        self.network = network
        self.gateway = network.machine("gateway", 1)
        self.key = make_pair(folder / "gateway" / "state")
        self.nodes = [self.node(number) for number in range(1, count + 1)]
        addresses = [node.address for node in self.nodes]
        self.fronts = []
        for number in range(1, 4):
            home = folder / f"front-{number}"
            shutil.copytree(folder / "gateway/state/wire", home / "state/wire")
            self.fronts.append(FleetFront(self.gateway, home, number, addresses))
        self.wait_whole()
        self.expected = {prompt: self._undisturbed(prompt) for prompt in PROMPTS}

    def node(self, number: int, name: str = "") -> FleetNode:
        home = self.folder / (name or f"mac-{number}")
        home.mkdir(exist_ok=True)
        machine = self.network.machine(f"mac{number}", 10 + number)
        return FleetNode(machine, home, self.model, self.key)

    def _undisturbed(self, prompt: str) -> str:
        said = self.gateway.do(partial(stream, self.fronts[0].port, prompt))
        assert said.ended, said
        assert said.text
        return said.text

    def busiest(self) -> FleetNode:
        """Waits until some node has a request, and returns the node with the most requests."""

        def running() -> dict[str, int]:
            told = self.fronts[-1].nodes().items()
            return {name: sum(slot["running"] for slot in node["slots"]) for name, node in told}

        wait_for(lambda: any(running().values()), "a node with work")
        work = running()
        return max(self.nodes, key=lambda node: work.get(node.machine.name, 0))

    def mend(self) -> None:
        """Restarts nodes and front ends that an earlier, failed test killed and left so."""
        for each in (*self.fronts, *self.nodes):
            if each.running.process.poll() is not None:
                each.start()
        self.wait_whole()

    def wait_whole(self) -> None:
        """Waits until every front end is ready and can use every node; fails if a process has
        ended."""
        names = {node.machine.name for node in self.nodes}

        def whole() -> bool:
            for each in (*self.fronts, *self.nodes):
                code = each.running.process.poll()
                assert code is None, f"{each.running.log()}\nit has left: {code}"
            return all(front.ready() and front.usable() == names for front in self.fronts)

        wait_for(whole, "every front end to use every node")


@dataclass
class FleetAnswer:
    text: str = ""
    ended: bool = False
    error: str = ""
    refused: bool = False
    """True if the connection was refused, so that the request reached no front end."""

    def take(self, line: bytes) -> None:
        if line == b"data: [DONE]":
            self.ended = True
        elif line.startswith(b"data: "):
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                self.error = str(event["error"])
            for choice in event.get("choices", ()):
                self.text += choice["delta"].get("content") or ""


def _get(port: int, path: str) -> tuple[int, bytes]:
    with contextlib.closing(HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)) as connection:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()


def stream(port: int, prompt: str) -> FleetAnswer:
    """Sends one streamed chat and reads it to its end; errors are recorded in the answer, not
    raised. Call on a thread that is in the gateway's network namespace."""
    result = FleetAnswer()
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": TOKENS[prompt],
        "stream": True,
    }
    headers = {"Content-Type": "application/json"}
    with contextlib.closing(HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)) as connection:
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                result.error = f"{response.status}: {response.read()!r}"
                return result
            for line in response:
                result.take(line.strip())
        except (OSError, HTTPException) as error:
            result.refused = isinstance(error, ConnectionRefusedError)
            result.error = repr(error)
    return result


@dataclass
class FleetLoad:
    """A context manager that runs ``clients`` clients, each of which sends one request after the
    other to the front ends. At the context's end each client first reads its last answer to the
    end."""

    fleet: Fleet
    clients: int = 6
    think_s: float = 0.0
    """Seconds that a client waits before its next request."""
    done: Counter[int] = field(default_factory=Counter)
    """Number of correct answers of each front end, by the front end's number."""
    wrong: list[str] = field(default_factory=list)
    """Descriptions of answers that were lost or wrong, except answers of killed front ends."""
    avoided: set[int] = field(default_factory=set)
    """Numbers of front ends that get no new requests, as if a proxy had taken them out of
    rotation."""
    killed: set[int] = field(default_factory=set)

    def __enter__(self) -> FleetLoad:
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(number,), daemon=True)
            for number in range(self.clients)
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(2 * DEADLINE_S)
            assert not thread.is_alive(), "a stream has no end"

    def wait_more(self, count: int) -> None:
        """Waits until ``count`` more requests were answered; fails at a wrong answer."""
        aim = self.done.total() + count
        wait_for(lambda: self.done.total() >= aim or bool(self.wrong), "answers")
        assert not self.wrong

    def _ask(self, number: int) -> None:
        enter(self.fleet.gateway.namespace)
        for turn in itertools.count(number):
            if self._over.wait(self.think_s):
                return
            fronts = [f for f in self.fleet.fronts if f.number not in self.avoided | self.killed]
            front = fronts[turn % len(fronts)]
            prompt = PROMPTS[turn % len(PROMPTS)]
            said = stream(front.port, prompt)
            if said.ended and said.text == self.fleet.expected[prompt]:
                self.done[front.number] += 1
            elif front.number in self.killed or (said.refused and front.number in self.avoided):
                continue  # with another front end, as a proxy does
            else:
                self.wrong.append(f"front end {front.number}, {prompt!r}: {said}")


@contextlib.contextmanager
def fleet(model: Path, folder: Path) -> Iterator[Fleet]:
    """Runs a fleet of three nodes until the context ends, then ends all its processes."""
    with Network() as network:
        yield Fleet(network, model, folder)
    for state in folder.glob("*/state"):  # reapers that were killed leave their sockets
        shutil.rmtree(runtime_of(state).folder, ignore_errors=True)
