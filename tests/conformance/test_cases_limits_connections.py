"""Limits on the cost of a connection and of a request's head. docs/reported-faults.md lists the ids
in test names."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from mayfly_server.settings import ConnectionLimits
from support.doubles.fake_node import FakeNode, accept, step
from support.raw_http import (
    CHAT,
    HELLO,
    MIB,
    SECRET,
    MemoryGrowth,
    assert_probe_answers_during,
    bearer,
    connect,
    read_to_end,
    status_of,
    status_of_raw,
)
from support.running_front import RunningFront


def test_R130_heads_have_bounds(front: RunningFront) -> None:
    def status(head: str) -> int:
        return status_of_raw(front, f"{head}\r\n\r\n")

    start = "GET /livez HTTP/1.1\r\nHost: localhost"
    assert status(f"{start}\r\nX: {'x' * 30_000}") == 200
    assert status(f"{start}\r\nX: {'x' * 33_000}") == 431
    assert status(start + "\r\nX: y" * 100) == 200
    assert status(start + "\r\nX: y" * 200) == 431
    assert status(f"GET /livez?{'x' * 8_000} HTTP/1.1\r\nHost: localhost") == 200
    assert status(f"GET /livez?{'x' * 9_000} HTTP/1.1\r\nHost: localhost") == 414


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"X: " + b"x" * 65536, 431),
        (b"X" * 65536, 431),
        (b"X: y\r\n" * 10_000, 431),
        (b"/" * 65536, 414),
    ],
)
def test_R130_what_never_ends_is_cut_off(front: RunningFront, line: bytes, status: int) -> None:
    """A hundred megabytes of one head: at most a little of it is ever held."""
    with MemoryGrowth() as memory, connect(front) as connection:
        start = b"GET " if status == 414 else b"GET / HTTP/1.1\r\nHost: localhost\r\n"
        with contextlib.suppress(ConnectionError, TimeoutError):
            connection.sendall(start)
            for _ in range(100 * MIB // len(line)):
                connection.sendall(line)
        answer = read_to_end(connection)
    assert status_of(answer) in (status, 0)
    assert memory.peak < 8 * MIB
    assert front.client.get("/livez").status_code == 200


def test_R130_slow_lorises(hurried: RunningFront) -> None:
    """Two hundred connections that send a byte now and then are told off, and nobody waits for
    them. So are those that send nothing, or only line ends."""
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        lorises = [stack.enter_context(connect(hurried)) for _ in range(200)]

        def drip() -> None:
            for text in ("GET / HT", "TP/1.1\r\n", "Host: "):
                for loris in lorises[:180]:
                    with contextlib.suppress(ConnectionError):
                        loris.sendall(text.encode())
                time.sleep(0.3)
            for loris in lorises[180:190]:
                with contextlib.suppress(ConnectionError):
                    loris.sendall(b"\r\n\r\n")

        assert_probe_answers_during(hurried, drip)
        answers = [read_to_end(loris) for loris in lorises]
    assert time.monotonic() - began < 15
    assert {status_of(answer) for answer in answers[:180]} == {408}
    assert {status_of(answer) for answer in answers[180:]} == {0}


def test_R130_slow_bodies(hurried: RunningFront) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    for framing in ("Content-Length: 100\r\n\r\n{", "Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"):
        with connect(hurried) as connection:
            connection.sendall((head + framing).encode())
            answer = read_to_end(connection)
        assert status_of(answer) == 408
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["retryable"] is True


def test_R130_trailers_and_chunk_extensions_have_bounds(hurried: RunningFront) -> None:
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        "Transfer-Encoding: chunked\r\n\r\n"
    ).encode()
    endless = (b"1;" + b"x" * 65536, b"1\r\n{\r\n0\r\nX: " + b"x" * 65536)
    for start in endless:
        with MemoryGrowth() as memory, connect(hurried) as connection:
            with contextlib.suppress(ConnectionError, TimeoutError):
                connection.sendall(head + start)
                for _ in range(400):
                    connection.sendall(b"x" * 65536)
            assert status_of(read_to_end(connection)) in (431, 400, 0)
        assert memory.peak < 8 * MIB


def test_R130_a_body_in_small_chunks_is_fine(locked: RunningFront) -> None:
    """The body's framing is five times as long as the body, and longer than a head may be."""
    body = json.dumps(HELLO | {"user": "x" * 10_000}).encode()
    response = locked.client.post(
        CHAT,
        content=(body[at : at + 1] for at in range(len(body))),
        headers=bearer(SECRET) | {"content-type": "application/json"},
    )
    assert response.status_code == 200


def test_R130_so_many_connections(node: FakeNode) -> None:
    limits = ConnectionLimits(max_connections=5, linger_s=0.5)
    with RunningFront(node.control, connections=limits) as front, contextlib.ExitStack() as stack:
        front.client.close()
        front.wait(lambda: not front.connections)
        held = [stack.enter_context(connect(front)) for _ in range(5)]
        front.wait(lambda: len(front.connections) == 5)
        with connect(front) as one_more:
            one_more.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert status_of(read_to_end(one_more)) == 503
        held.pop().close()
        front.wait(lambda: len(front.connections) == 4)
        assert status_of_raw(front, "GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n") == 200


def test_R130_a_client_that_does_not_read_is_cut(hurried: RunningFront, node: FakeNode) -> None:
    """The client loses its connection, and the worker learns that nobody waits any more."""

    def endless(submit: Any) -> Iterator[Any]:
        yield accept(submit)
        for position in range(160):
            yield step(submit, position, "x" * 65536)
        yield threading.Event()

    worker = node.workers[0]
    cancelled = len(worker.cancels)
    before, worker.script = worker.script, endless
    try:
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", hurried.port))
            body = json.dumps(HELLO | {"stream": True})
            connection.sendall(
                f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
            )
            hurried.wait(lambda: len(worker.cancels) == cancelled + 1)
    finally:
        worker.script = before
