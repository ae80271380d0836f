"""The limit of open files of a process, and a front end's use of it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack

import pytest

from mayfly_server.settings import ConnectionLimits
from support.doubles.fake_node import FakeNode
from support.running_front import PATIENCE_S, RunningFront

FILES = 100


def limited(how: str, files: int, *arguments: str) -> list[str]:
    """A Python process for which ``ulimit`` has set its limit; "" sets the hard one, too."""
    script = f'ulimit {how} -n {files} && exec "$0" "$@"'
    return ["sh", "-c", script, sys.executable, "-W", "error", *arguments]


@pytest.mark.process
@pytest.mark.parametrize(("how", "raised"), [("-S", True), ("", False)])
def test_the_limit_is_raised_as_far_as_it_may_be(how: str, raised: bool) -> None:
    script = (
        "import resource; from mayfly_protocol.common import limits; "
        "print(limits.raise_open_file_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    ran = subprocess.run(limited(how, FILES, "-c", script), check=True, stdout=subprocess.PIPE)
    found, soft, hard = map(int, ran.stdout.split())
    assert found == soft
    assert soft == min(hard, 65536) if raised else (soft, hard) == (FILES, FILES)


@pytest.mark.process
def test_too_few_for_a_worker_are_raised_or_said() -> None:
    """Root may raise a hard limit, where nobody has taken that from it."""
    script = (
        "import resource; from mayfly_cli.commands import starting; starting.require_open_files(); "
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    ran = subprocess.run(limited("", FILES, "-c", script), capture_output=True, text=True)
    if ran.returncode == 0:
        assert ran.stdout.split() == [str(FILES), "4096"]
    else:
        assert (ran.returncode, ran.stdout) == (1, "")
        assert f"at most {FILES} files open" in " ".join(ran.stderr.split())


@pytest.mark.parametrize(
    ("files", "connections"), [(65536, 4096), (4352, 4096), (1024, 768), (300, 150)]
)
def test_some_files_are_not_for_connections(files: int, connections: int) -> None:
    assert ConnectionLimits().within(files).max_connections == connections


@pytest.mark.process
def test_more_connections_than_open_files_are_refused_in_words() -> None:
    with FakeNode() as node, ExitStack() as stack:
        logs = json.dumps({"logs": {"form": "json"}})
        arguments = ("--node", node.control, "--port", "0", "--settings", logs)
        command = limited("", FILES, "-m", "mayfly_server.front", *arguments)
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        stack.callback(process.communicate)
        stack.callback(process.kill)
        assert process.stderr is not None
        port = json.loads(process.stderr.readline())["addresses"][0][1]
        said = json.loads(process.stderr.readline())
        assert (said["connections"], said["open_files"]) == (FILES // 2, FILES)
        held = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE_S))
            for _ in range(FILES // 2 + 10)
        ]
        assert Counter(map(status, held)) == {200: FILES // 2, 503: 10}
        for connection in held[1:]:
            connection.close()
        RunningFront.wait(lambda: one_more(port) == 200)


def one_more(port: int) -> int:
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as connection:
        return status(connection)


def status(connection: socket.socket) -> int:
    connection.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
    return int(connection.recv(4096).split()[1])
