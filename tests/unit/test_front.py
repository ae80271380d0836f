"""A front end's process: its start, and the reasons for which it exits."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import httpx
import pytest

from mayfly_protocol.lifecycle import Exit
from mayfly_protocol.serving import Submit
from support.doubles.fake_node import (
    WORDS,
    FakeNode,
    ScriptStep,
    accept,
    answer_then,
    answer_words,
    step,
)
from support.running_front import PATIENCE_S, RunningFront

pytestmark = pytest.mark.process

HELLO = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
FEW = {"connections": {"max_connections": 64}}
"""For which there are enough open files anywhere: a want of them would be told."""
Process = subprocess.Popen[bytes]


@pytest.fixture
def node() -> Iterator[FakeNode]:
    with FakeNode() as node:
        node.worker()
        yield node


@contextmanager
def front_end(*arguments: str, fd: int | None = None) -> Iterator[Process]:
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "mayfly_server.front", *arguments],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=[] if fd is None else [fd],
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stderr):
            if pipe is not None:
                pipe.close()


@pytest.mark.parametrize("insecure", [False, True])
def test_others_need_a_key(node: FakeNode, insecure: bool) -> None:
    settings = json.dumps({"insecure": insecure, "logs": {"form": "json"}})
    arguments = ("--host", "0.0.0.0", "--port", "0", "--settings", settings)
    with front_end("--node", node.control, *arguments) as process:
        assert process.stderr is not None
        if not insecure:
            assert process.wait(PATIENCE_S) == 1
            assert b"without a key" in process.stderr.read()
            return
        port = json.loads(process.stderr.readline())["addresses"][0][1]

        def answers() -> bool:
            with suppress(httpx.ConnectError):
                return httpx.get(f"http://127.0.0.1:{port}/livez").status_code == 200
            return False

        RunningFront.wait(answers)


def test_a_client_that_is_cut_is_no_error_of_the_server() -> None:
    """The log says so once, with the request's id."""

    def flood(submit: Submit) -> Iterator[ScriptStep]:
        yield accept(submit)
        for position in range(8000):
            yield step(submit, position, "x" * 4000)

    settings = json.dumps({"max_unread_bytes": 65536, "logs": {"form": "json"}, **FEW})
    body = json.dumps(HELLO)
    asked = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}"
    with FakeNode() as node:
        node.worker(flood)
        with front_end("--node", node.control, "--port", "0", "--settings", settings) as process:
            assert process.stderr is not None
            port = json.loads(process.stderr.readline())["addresses"][0][1]
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(f"{asked}\r\n\r\n{body}".encode())
                said = [json.loads(process.stderr.readline())]
                process.terminate()
                said += map(json.loads, process.stderr)
    assert said[0]["event"] == "connection cut: the client does not read its answer"
    assert not [line for line in said if line["level"] == "error"]


def test_keys_that_cannot_be_used(node: FakeNode) -> None:
    settings = '{"api_keys_file": "/no/such/file.toml"}'
    arguments = ("--node", node.control, "--port", "0", "--settings", settings)
    with front_end(*arguments) as process:
        assert process.wait(PATIENCE_S) == 1
        assert process.stderr is not None
        assert b"/no/such/file.toml cannot be read" in process.stderr.read()


@contextmanager
def inheriting(node: FakeNode, *more: str) -> Iterator[tuple[Process, httpx.Client]]:
    """A front end on a socket that the test holds too, and a client of it."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        arguments = ("--fd", str(listener.fileno()), "--node", node.control, *more)
        process = stack.enter_context(front_end(*arguments, fd=listener.fileno()))
        client = stack.enter_context(httpx.Client(base_url=url, timeout=PATIENCE_S))
        RunningFront.wait(lambda: client.get("/readyz").status_code == 200)
        yield process, client


def ended(process: Process) -> tuple[int, list[str]]:
    """Returns the exit status and the lines of stderr."""
    status = process.wait(PATIENCE_S)
    assert process.stderr is not None
    return status, process.stderr.read().decode().splitlines()


def streaming(client: httpx.Client, answers: list[str]) -> threading.Thread:
    def read() -> None:
        answers.append(client.post("/v1/chat/completions", json=HELLO).text)

    thread = threading.Thread(target=read)
    thread.start()
    return thread


def test_it_serves_on_an_inherited_socket_and_says_so_to_the_reaper(node: FakeNode) -> None:
    with inheriting(node, "--settings", json.dumps(FEW)) as (process, client):
        assert node.asked.wait(PATIENCE_S)
        text = client.post("/v1/chat/completions", json=HELLO).text
        assert all(f'"content":"{word}"' in text for word in WORDS)
        process.send_signal(signal.SIGTERM)
        assert ended(process) == (0, []), "its reaper tells what there is to tell"


def test_it_serves_on_a_socket_of_its_own(node: FakeNode) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    settings = json.dumps({"logs": {"form": "json"}, **FEW})
    of = ("--node", node.control, "--port", str(port), "--settings", settings)
    with front_end(*of) as process:
        assert process.stdin is not None
        process.stdin.close()  # of no meaning here
        RunningFront.wait(lambda: answers(f"http://127.0.0.1:{port}/readyz"))
        process.send_signal(signal.SIGTERM)
        status, lines = ended(process)
    assert status == 0
    assert [json.loads(line)["event"] for line in lines] == ["front end starts"]


def test_the_garbage_collector_leaves_alone_what_was_imported(node: FakeNode) -> None:
    script = (
        "import gc, sys; from mayfly_server import front; front.main(sys.argv[1:]); "
        "print(gc.get_freeze_count(), len(gc.get_objects()))"
    )
    logs = json.dumps({"logs": {"form": "json"}, "notice_s": 0})
    command = [sys.executable, "-W", "error", "-c", script, "--node", node.control]
    command += ["--port", "0", "--settings", logs]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        try:
            port = json.loads(process.stderr.readline())["addresses"][0][1]
            RunningFront.wait(lambda: answers(f"http://127.0.0.1:{port}/readyz"))
            process.send_signal(signal.SIGTERM)
            frozen, watched = process.communicate(timeout=PATIENCE_S)[0].split()
        finally:
            process.kill()
    assert int(frozen) > 10 * int(watched)


def answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


def test_it_leaves_at_once_when_the_reaper_is_gone(node: FakeNode) -> None:
    node.workers[0].script = answer_then(1, lambda submit: iter((60.0,)))
    with inheriting(node) as (process, client):
        with client.stream("POST", "/v1/chat/completions", json=HELLO) as response:
            parts = response.iter_raw()
            next(parts)
            assert process.stdin is not None
            process.stdin.close()
            with pytest.raises(httpx.RemoteProtocolError):
                list(parts)
        assert process.wait(PATIENCE_S) == Exit.ORPHANED


FIRST_TOKEN = 'mayfly_time_to_first_token_seconds_count{model="tiny"} 1.0'


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_streams_finish_after_a_stop(node: FakeNode, number: signal.Signals) -> None:
    gate = threading.Event()

    def rest(submit):  # type: ignore[no-untyped-def]
        yield gate
        yield from list(answer_words()(submit))[2:]

    node.workers[0].script = answer_then(1, rest)
    with inheriting(node) as (process, client):
        answers: list[str] = []
        thread = streaming(client, answers)
        RunningFront.wait(lambda: FIRST_TOKEN in client.get("/metrics").text)
        process.send_signal(number)
        RunningFront.wait(lambda: refuses(client))
        gate.set()
        thread.join()
        assert ended(process)[0] == 0
    assert answers[0].endswith("data: [DONE]\n\n")


def refuses(client: httpx.Client) -> bool:
    """Returns True if a new connection is not answered; the test's own end of the socket takes
    it."""
    try:
        httpx.get(f"{client.base_url}/livez", timeout=0.2)
    except httpx.TransportError:
        return True
    return False


def test_streams_that_do_not_finish_end_with_an_error(node: FakeNode) -> None:
    node.workers[0].script = answer_then(1, lambda submit: iter((60.0,)))
    with inheriting(node, "--grace", "1") as (process, client):
        answers: list[str] = []
        thread = streaming(client, answers)
        RunningFront.wait(lambda: FIRST_TOKEN in client.get("/metrics").text)
        process.send_signal(signal.SIGTERM)
        thread.join()
        assert ended(process)[0] == 0
    assert '"code":"shutting_down"' in answers[0]


def test_a_taken_port_is_said_in_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with front_end("--node", "ipc:///tmp/none/node.ipc", "--port", port) as process:
            status, lines = ended(process)
    assert status == 1
    assert lines == [f"cannot listen on 127.0.0.1 port {port}: Address already in use"]


def test_it_never_imports_mlx() -> None:
    check: Callable[[str], str] = (
        "import sys, mayfly_server.front; "
        "sys.exit(any(name.partition('.')[0] in {} for name in sys.modules))"
    ).format
    names = ("mlx", "mlx_lm", "mayfly_worker", "mayfly_reaper")
    assert subprocess.run([sys.executable, "-c", check(names)], check=False).returncode == 0
