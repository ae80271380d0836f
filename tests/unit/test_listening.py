"""Sockets that systemd hands over."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from mayfly_server.front import ListenError, activated
from support.doubles.fake_node import FakeNode
from support.running_front import PATIENCE_S, RunningFront

PID = 4711


def handed(count: object, first: int, *, pid: int = PID) -> list[socket.socket]:
    environ = {"LISTEN_PID": str(pid), "LISTEN_FDS": str(count), "LISTEN_FDNAMES": "http"}
    try:
        return activated(environ, pid=PID, first=first)
    finally:
        assert environ == {}, "children must not take them for theirs"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def test_they_are_taken_over(listener: socket.socket) -> None:
    fd = os.dup(listener.fileno())
    os.set_inheritable(fd, True)
    [taken] = handed(1, fd)
    with taken:
        assert taken.getsockname() == listener.getsockname()
        assert not taken.get_inheritable()


def test_those_of_another_process_are_left_alone(listener: socket.socket) -> None:
    assert handed(1, listener.fileno(), pid=PID + 1) == []
    assert activated({}, pid=PID) == []


def test_what_cannot_be_served_on_is_refused(listener: socket.socket) -> None:
    with pytest.raises(ListenError, match="LISTEN_FDS is 'many'"):
        handed("many", 3)
    with Path(os.devnull).open() as file, pytest.raises(ListenError, match="is no socket"):
        handed(1, file.fileno())
    with (
        socket.create_connection(listener.getsockname()) as client,
        pytest.raises(ListenError, match="Accept=no"),
    ):
        handed(1, os.dup(client.fileno()))
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams,
        pytest.raises(ListenError, match="no listening TCP socket"),
    ):
        handed(1, os.dup(datagrams.fileno()))


@pytest.mark.process
@pytest.mark.skipif(
    shutil.which("systemd-socket-activate") is None, reason="systemd-socket-activate is missing"
)
def test_systemd_starts_a_front_end_at_the_first_connection() -> None:
    """systemd's own tool: it listens, and becomes the front end when a client connects."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    front = [sys.executable, "-W", "error", "-m", "mayfly_cli", "front", "--log-format", "json"]
    with FakeNode() as node:
        node.worker()
        process = subprocess.Popen(
            ["systemd-socket-activate", f"--listen=127.0.0.1:{port}"]
            + [f"--setenv={name}" for name in os.environ if not name.startswith("LISTEN_")]
            + [*front, "--node", node.control, "--max-connections", "64"]
            + ["--port", "1"],  # which it must not try
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        try:
            RunningFront.wait(lambda: connects(port))
            assert httpx.get(f"{url}/livez", timeout=PATIENCE_S).status_code == 200
            process.send_signal(signal.SIGTERM)
            _, stderr = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
            process.communicate()
    assert process.returncode == 0, stderr
    [started] = [json.loads(line) for line in stderr.splitlines() if line.startswith(b"{")]
    assert started["addresses"] == [["127.0.0.1", port]]


def connects(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
