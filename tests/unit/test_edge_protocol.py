"""HTTP/1.1 from a raw socket, as clients speak it that were not written for this server."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

import pytest

from support.doubles.fake_node import answer_words
from support.front_client import following
from support.raw_http import CHAT, HELLO, LIMITS, connect, read_to_end, status_of
from support.running_front import RunningFront

BODY = json.dumps(HELLO)
GET = "GET /livez HTTP/1.1\r\nHost: localhost\r\n"
LAST = f"{GET}Connection: close\r\n\r\n"
H2C = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
WEBSOCKET = "Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"


def post(*fields: str, path: str = CHAT) -> str:
    """The head of a request whose body is sized."""
    sized = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(BODY)}\r\n"
    return sized + "".join(fields) + "\r\n"


def chunked(*fields: str) -> str:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
    return f"{head}{''.join(fields)}\r\n{len(BODY):x}\r\n{BODY}\r\n0\r\n\r\n"


def statuses(answers: bytes) -> list[int]:
    """Returns the statuses of all answers on a connection; no body may hold such a line."""
    return [int(part[:3]) for part in answers.split(b"HTTP/1.1 ")[1:]]


def pieces(text: str, size: int) -> Iterator[bytes]:
    data = text.encode()
    for begin in range(0, len(data), size):
        yield data[begin : begin + size]


@pytest.mark.parametrize("wish", [H2C, WEBSOCKET], ids=["h2c", "websocket"])
@pytest.mark.parametrize("size", [1 << 16, 64, 7], ids=str)
def test_who_asks_for_another_protocol_is_answered_in_this_one(
    front: RunningFront, wish: str, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Each request with its own body, however it is framed and cut, and the next one after it."""
    asked = [post(wish) + BODY, chunked(wish), f"{GET}{wish}\r\n", post(wish, path="/v1") + BODY]
    with caplog.at_level(logging.WARNING), connect(front) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces("".join([*asked, post() + BODY, LAST]), size):
            connection.sendall(piece)
        assert statuses(read_to_end(connection)) == [200, 200, 200, 404, 200, 200]
    assert not caplog.records


def test_bounds_hold_for_those_too(front: RunningFront) -> None:
    with connect(front) as connection:
        connection.sendall(post(H2C, f"X: {'x' * 33_000}\r\n").encode())
        assert status_of(read_to_end(connection)) == 431
    with connect(front) as connection:
        connection.sendall(post(H2C).encode() + b"x" * len(BODY) + LAST.encode())
        assert statuses(read_to_end(connection)) == [400, 200]


@pytest.mark.parametrize(
    "line",
    [
        "CONNECT localhost:443",
        "GET /v1/models/\N{LATIN SMALL LETTER E WITH ACUTE}",
        "GET http://[",
        "GET http://localhost:99999/",
    ],
)
def test_addresses_that_cannot_be_read_are_answered(front: RunningFront, line: str) -> None:
    before = front.metric("mayfly_rejections_total{")
    with connect(front) as connection:
        connection.sendall(f"{line} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        answer = read_to_end(connection)
    assert status_of(answer) == 400
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
    assert front.metric("mayfly_rejections_total{") == before + 1


CONNECT = b"CONNECT a:1 HTTP/1.1\r\n\r\n"
TOO_LONG = GET.encode() + b"X: " + b"x" * 40_000


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("requests", "behind"),
    [(1, b"}"), (1, b" "), (1, b"\0"), (1, CONNECT), (1, TOO_LONG), (1, b"GE"), (2, b"}")],
    ids=["rest of a body", "space", "nothing", "connect", "too long", "slow", "queued"],
)
def test_what_comes_behind_a_request_costs_it_no_answer(
    requests: int, behind: bytes, stream: bool
) -> None:
    """A client that counts the characters of its body instead of the bytes sends such bytes."""
    gate = threading.Event()
    body = json.dumps(HELLO | {"stream": stream})
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    # Nobody but who is slow waits it out.
    limits = replace(LIMITS, head_wait_s=1.5) if behind == b"GE" else LIMITS
    with (
        following(
            lambda submit: chain((gate,), answer_words()(submit)), connections=limits
        ) as front,
        connect(front) as connection,
    ):
        connection.sendall((head + body).encode() * requests + behind)
        front.wait(lambda: front.metric("mayfly_rejections_total{"))
        gate.set()
        answers = read_to_end(connection)
    assert statuses(answers) == [200] * requests
    assert answers.count(b'"finish_reason":"stop"') == requests
    assert answers.endswith(b"0\r\n\r\n" if stream else b"}")


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (post("Expect: 100-continue\r\n", path="/v1"), 404),
        (post("Expect: 100-continue\r\n", path="/livez"), 405),
        (post("Expect: 100-continue\r\n", "Content-Encoding: gzip\r\n"), 415),
        (post("Expect: 100-Continue\r\n", "Content-Type: text/plain\r\n"), 415),
        (post("Expect: 100-continue\r\n", "Origin: https://elsewhere\r\n"), 403),
    ],
)
def test_a_body_that_was_never_asked_for(front: RunningFront, head: str, status: int) -> None:
    """The client may send it, or another request in its place: either would be misread."""
    with connect(front) as connection:
        connection.sendall(head.encode())
        answer = read_to_end(connection)
    assert statuses(answer) == [status]
    assert b"connection: close" in answer


def test_a_body_that_was_asked_for(front: RunningFront) -> None:
    with connect(front) as connection:
        connection.sendall(post("Expect: 100-continue\r\n").encode())
        assert status_of(connection.recv(100)) == 100
        connection.sendall(BODY.encode() + LAST.encode())
        assert statuses(read_to_end(connection)) == [200, 200]
