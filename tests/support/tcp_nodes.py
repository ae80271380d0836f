"""Runs nodes (workers) and front ends (HTTP) as processes that talk over TCP with keys, and a proxy
between them that can hold back or cut connections."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import zmq

from mayfly_protocol.codec import rosters
from mayfly_protocol.roster import SlotView
from mayfly_protocol.transport.keys import (
    KeyPair,
    make_pair,
    new_pair,
    read_pair,
    trusted_file,
    write_trusted,
)
from mayfly_protocol.transport.sockets import configure, connect_curve
from support.processes import alive
from support.server import free_port, free_ports, wait_for

DEADLINE_S = 60.0
A_DAY_OFF = ("unshare", "--time", "--monotonic", "86400", "--boottime", "86400")
"""Command prefix that runs a command with its monotonic clock a day ahead of the system's (Linux,
root)."""
OTHER_HOST = "127.0.0.2"
"""Address on which the proxy listens. It needs a host address of its own, because a front end
connects to workers at their node's host, with each worker's port."""


def require_other_host() -> None:
    """Skips the test if the loopback interface lacks the address 127.0.0.2, as on macOS."""
    try:
        socket.create_server((OTHER_HOST, 0)).close()
    except OSError as error:
        pytest.skip(f"this system has no {OTHER_HOST}: {error}")


def send_unless_refused(peer: zmq.Socket[Any], frame: bytes) -> None:
    """Sends a frame, or drops it if the socket has no connection (any more); an ordinary send would
    wait for a connection for ever."""
    with contextlib.suppress(zmq.Again):
        peer.send(frame, zmq.NOBLOCK)


class MayflyProcess:
    """A running ``mayfly`` command with its log in ``folder``; ``inside`` is a prefix of the
    command line. :meth:`close` ends it with all processes that it started."""

    def __init__(
        self, folder: Path, name: str, *arguments: str, inside: tuple[str, ...] = ()
    ) -> None:
        self._path = folder / f"{name}.log"
        with self._path.open("a") as log:
            self.process = subprocess.Popen(
                [*inside, sys.executable, "-m", "mayfly_cli", *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
            )

    def log(self) -> str:
        return self._path.read_text(errors="replace")

    def stop(self, how: int = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        return self.process.wait(30)

    def close(self) -> None:
        started = []
        with contextlib.suppress(psutil.NoSuchProcess):
            started = psutil.Process(self.process.pid).children(recursive=True)
        if self.process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.stop()
        for process in started:
            if alive(process):
                process.kill()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class TcpNode(MayflyProcess):
    """A running ``mayfly node MODEL`` with a key, on the loopback interface, with ports for four
    workers. A second object with the same ``folder`` is the same node, restarted."""

    WORKERS = 4

    def __init__(
        self,
        model: Path,
        folder: Path,
        *trusted: str,
        options: tuple[str, ...] = (),
        port: int = 0,
        a_day_off: bool = False,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.model = model
        self.state_dir = folder / "state"
        self.pair = read_pair(self.state_dir) or make_pair(self.state_dir)
        self.trust(*trusted)
        self.port = port or free_ports(2 + self.WORKERS)
        self.worker_ports = range(self.port + 2, self.port + 2 + self.WORKERS)
        ports = f"{self.worker_ports[0]}-{self.worker_ports[-1]}"
        super().__init__(
            folder,
            "node",
            *("node", str(model), "--state-dir", str(self.state_dir), "--no-preload-blas"),
            *("--control-port", str(self.port), "--worker-ports", ports, *options),
            inside=A_DAY_OFF if a_day_off else (),
        )

    def trust(self, *keys: str) -> None:
        """Makes the node trust the peers with these public keys, and no others."""
        trusted = {key: f"peer-{number}" for number, key in enumerate(keys)}
        write_trusted(trusted_file(self.state_dir), trusted)

    @contextlib.contextmanager
    def trusting(self, *keys: str) -> Iterator[None]:
        """Makes the node trust only these public keys until the context ends, then those of
        before."""
        file = trusted_file(self.state_dir)
        before = file.read_text()
        self.trust(*keys)
        try:
            yield
        finally:
            file.write_text(before)

    def address(self, host: str = "127.0.0.1") -> str:
        return f"tcp://{self.pair.public}@{host}:{self.port}"


class TcpFront(MayflyProcess):
    """A running ``mayfly front``, the HTTP front end of the given nodes. Make its key
    (:meth:`key`), and let the nodes trust the key, before the nodes start."""

    def __init__(self, folder: Path, *nodes: str, options: tuple[str, ...] = ()) -> None:
        folder.mkdir(exist_ok=True)
        self.port = free_port()
        named = [part for node in nodes for part in ("--node", node)]
        super().__init__(
            folder,
            "front",
            *("front", *named, "--port", str(self.port), "--state-dir", str(folder / "state")),
            *options,
        )
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=DEADLINE_S)

    @staticmethod
    def key(folder: Path) -> KeyPair:
        """Returns the key pair that a front end with this folder will use; makes it if need be."""
        state_dir = folder / "state"
        return read_pair(state_dir) or make_pair(state_dir)

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, f"the front end has left:\n{self.log()}"
            with contextlib.suppress(httpx.TransportError):
                return self.http.get("/readyz").status_code == 200
            return False

        wait_for(ready, "a ready front end", DEADLINE_S)

    def chat(self, text: str, **options: object) -> httpx.Response:
        [model] = self.http.get("/v1/models").json()["data"]
        body = {"model": model["id"], "temperature": 0, "max_tokens": 8, **options}
        body["messages"] = [{"role": "user", "content": text}]
        return self.http.post("/v1/chat/completions", json=body)

    def metric(self, beginning: str) -> float:
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(beginning))

    def close(self) -> None:
        self.http.close()
        super().close()


class TcpProxy:
    """A TCP proxy from ``ports`` of :data:`OTHER_HOST` to the same ports of 127.0.0.1, which
    records all bytes in ``passed``. While ``stalled`` is set, the proxy holds all bytes back;
    :meth:`cut` ends all connections."""

    def __init__(self, *ports: int) -> None:
        self.passed = bytearray()
        self.stalled = False
        self.open = True
        self._selector = selectors.DefaultSelector()
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._lock = threading.Lock()
        self._over = False
        self._listeners = []
        require_other_host()
        for port in ports:
            listener = socket.create_server((OTHER_HOST, port))
            self._listeners.append(listener)
            self._selector.register(listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """Closes every connection of the proxy; new ones are closed at once until :meth:`heal`."""
        self.open = False
        with self._lock:
            for end in list(self._pairs):
                self._end(end)

    def heal(self) -> None:
        self.open, self.stalled = True, False

    def close(self) -> None:
        self._over = True
        self._thread.join(10)
        self._close_all([*self._listeners, *self._pairs])
        self._selector.close()

    def __enter__(self) -> TcpProxy:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._over:
            if self.stalled:
                self._nap()
                continue
            for key, _ in self._selector.select(0.02):
                if self.stalled:
                    break
                end = key.fileobj
                assert isinstance(end, socket.socket)
                with self._lock:
                    if end in self._listeners:
                        self._accept(end)
                    elif end in self._pairs:
                        self._pass_on(end)

    @staticmethod
    def _nap() -> None:
        threading.Event().wait(0.02)

    def _accept(self, listener: socket.socket) -> None:
        near, _ = listener.accept()
        if not self.open:
            near.close()
            return
        try:
            far = socket.create_connection(("127.0.0.1", listener.getsockname()[1]))
        except OSError:
            near.close()
            return
        for end, other in ((near, far), (far, near)):
            self._pairs[end] = other
            self._selector.register(end, selectors.EVENT_READ)

    def _pass_on(self, end: socket.socket) -> None:
        try:
            content = end.recv(65536)
            self._pairs[end].sendall(content)
        except OSError:
            content = b""
        self.passed += content
        if not content:
            self._end(end)

    def _end(self, end: socket.socket) -> None:
        other = self._pairs.get(end)
        for each in (end, other):
            if each is not None and self._pairs.pop(each, None) is not None:
                self._selector.unregister(each)
                each.close()

    @staticmethod
    def _close_all(sockets: list[socket.socket]) -> None:
        for each in sockets:
            each.close()


class Site:
    """A node, a front end that reaches the node through a TCP proxy, and sockets of other peers.
    The node trusts the front end's key and the key ``friend``, which tests use; with ``a_day_off``
    the node's clocks are a day ahead."""

    def __init__(self, model: Path, folder: Path, *options: str, a_day_off: bool = False) -> None:
        require_other_host()
        front_folder, node_folder = folder / "front", folder / "node"
        front_folder.mkdir()
        self.own = TcpFront.key(front_folder)
        self.friend = new_pair()
        with contextlib.ExitStack() as running:  # a test may replace node, proxy or front end
            self.node = TcpNode(
                model,
                node_folder,
                *(self.own.public, self.friend.public),
                options=options,
                a_day_off=a_day_off,
            )
            running.callback(lambda: self.node.close())
            self.proxy = TcpProxy(self.node.port, self.node.port + 1, *self.node.worker_ports)
            running.callback(lambda: self.proxy.close())
            self.front = TcpFront(front_folder, self.node.address(OTHER_HOST))
            running.callback(lambda: self.front.close())
            self._running = running.pop_all()
        self.context: zmq.Context[Any] = zmq.Context()

    def close(self) -> None:
        self.context.destroy(linger=0)
        self._running.close()

    def roster(self) -> Any:
        [node] = self.front.http.get("/mayfly/status").json()["nodes"]
        return node

    def refused(self, reason: str) -> float:
        by = f'by="tcp://{OTHER_HOST}:{self.node.port}"'
        return self.front.metric(f'mayfly_wire_refusals_total{{{by},reason="{reason}"}}')

    def peer(self, kind: int, port: int, own: KeyPair | None, server: str) -> zmq.Socket[Any]:
        peer = self.context.socket(kind)
        configure(peer)
        if own is not None:
            connect_curve(peer, own, server)
        if kind == zmq.SUB:
            peer.subscribe(b"")
        peer.connect(f"tcp://127.0.0.1:{port}")
        return peer

    def worker(self) -> tuple[int, str]:
        """Returns the port and public key of the node's only worker, from the node's next status
        message."""
        view = self.view()
        return int(view.endpoint.rpartition(":")[2]), view.public_key

    def view(self) -> SlotView:
        """Returns the state of the node's only worker, as the node's next status message (roster)
        gives it."""
        listening = self.peer(zmq.SUB, self.node.port + 1, self.friend, self.node.pair.public)
        with listening:
            assert listening.poll(int(DEADLINE_S * 1000)), "no roster"
            [slot] = rosters.decode(listening.recv_multipart()[1]).slots
        return slot

    def ask_worker(self) -> zmq.Socket[Any]:
        """Returns a socket that is connected, with the trusted key ``friend``, to the node's only
        worker."""
        port, key = self.worker()
        return self.peer(zmq.DEALER, port, self.friend, key)
