"""Ends of requests that take too long or whose client does not read, and a front end that exits."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from mayfly_protocol.serving import Delta, Submit, Tokens
from support.doubles.fake_node import (
    WORDS,
    FakeNode,
    ScriptStep,
    accept,
    answer_then,
    answer_words,
    finish,
    step,
)
from support.front_client import CHAT, HELLO, TEXT
from support.relay_requests import ask, unread
from support.running_front import RunningFront


@pytest.fixture
def node() -> Iterator[FakeNode]:
    with FakeNode() as node:
        yield node


def forever(submit: Submit) -> Iterator[ScriptStep]:
    yield 60.0


def test_a_request_that_takes_too_long(node: FakeNode) -> None:
    """Whole and streamed, before a first word and after some."""

    def stuck(submit: Submit) -> Iterator[ScriptStep]:
        return answer_then(2 if "two" in str(submit.generation.prompt) else 0, forever)(submit)

    worker = node.worker(stuck)
    with (
        RunningFront(node.control, request_timeout_s=2.5, keep_alive_s=0.1) as front,
        ThreadPoolExecutor(4) as pool,
    ):
        whole = [pool.submit(ask, front, text) for text in ("none", "two")]
        streamed = [pool.submit(ask, front, text, stream=True) for text in ("none", "two")]
        for response in (each.result() for each in whole):
            assert (response.status_code, response.headers["x-should-retry"]) == (504, "false")
            assert response.json()["error"]["code"] == "deadline_exceeded"
        for said, text in zip((0, 2), (each.result().text for each in streamed), strict=True):
            last = json.loads(text.rstrip().rpartition("data: ")[2])
            assert last["error"]["code"] == "deadline_exceeded"
            assert text.count('"content":"') == said + (said > 0)
        front.wait(lambda: len(worker.cancels) == 4)


def test_it_takes_too_long_while_it_is_held(node: FakeNode) -> None:
    node.worker(answer_words(), state="loading")
    with RunningFront(node.control, ready=False, request_timeout_s=0.3) as front:
        began = time.monotonic()
        assert front.client.post(CHAT, json=HELLO).status_code == 504
        assert time.monotonic() - began < 20


def babbling(size: int, tokens: int, said: threading.Event | None = None) -> Any:
    def script(submit: Submit) -> Iterator[ScriptStep]:
        yield accept(submit)
        for position in range(tokens):
            yield step(submit, position, "x" * size)
            if position % 50 == 0:
                yield 0.001
        yield Tokens((Delta(submit.rid, submit.attempt, 0, tokens, finish="length"),))
        yield finish(submit, tokens)
        if said:
            said.set()

    return script


def read(client: socket.socket, deadline_s: float = 10.0, until: bytes | None = None) -> bytes:
    """Reads to the end of the connection, or to the bytes ``until``."""
    client.settimeout(deadline_s)
    content = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := client.recv(1 << 16):
            content += piece
            if until and until in content[-200:]:
                break
    return content


@pytest.mark.parametrize("prompts", [1, 3])
def test_a_client_that_does_not_read_is_cut(node: FakeNode, prompts: int) -> None:
    worker = node.worker(babbling(1000, 10_000))
    with RunningFront(node.control, max_unread_bytes=100_000) as front:
        body = {"prompt": ["a", "b", "c"][:prompts], "stream": True}
        with unread(front, TEXT, body) as client:
            front.wait(lambda: len(worker.cancels) == prompts)
            assert b"[DONE]" not in read(client)
        front.wait(lambda: front.metric("mayfly_num_requests_") == 0)
        assert front.metric('mayfly_requests_total{model="tiny",outcome="slow"}') == 1


def test_a_client_that_catches_up_in_time_misses_nothing(node: FakeNode) -> None:
    tokens = 5000
    said = threading.Event()
    scripts = iter([babbling(10, tokens, said), answer_words()])
    node.worker(lambda submit: next(scripts)(submit))
    with RunningFront(node.control, send_buffer=1 << 16) as front:
        with unread(front, CHAT, HELLO | {"stream": True}) as client:
            front.wait(said.is_set, patience_s=60)
            # One worker's messages arrive in order: after this answer all of the first is there.
            assert front.client.post(CHAT, json=HELLO).status_code == 200
            text = read(client, until=b"[DONE]")
        assert text.count(b"x" * 10) >= tokens
        assert text.count(b"data: ") < tokens / 2, "what waited was joined"


def test_a_leaving_front_end_says_so_before_it_takes_no_more(node: FakeNode) -> None:
    worker = node.worker(answer_words(pause_s=0.2))
    with RunningFront(node.control, notice_s=3.0, grace_s=5.0) as front:
        answers: list[httpx.Response] = []
        ask = lambda: answers.append(httpx.post(front.url + CHAT, json=HELLO))  # noqa: E731
        before = threading.Thread(target=ask)
        before.start()
        front.wait(lambda: worker.submits)
        front.stop()
        front.wait(lambda: front.client.get("/readyz").status_code == 503)
        assert "shutting down" in front.client.get("/readyz").json()["reason"]
        late = threading.Thread(target=ask)
        late.start()
        before.join()
        late.join()
        assert [answer.status_code for answer in answers] == [200, 200]
        assert [a.json()["choices"][0]["message"]["content"] for a in answers] == [
            "".join(WORDS)
        ] * 2
        front.wait(lambda: refused(front))


def refused(front: RunningFront) -> bool:
    """Returns True if nobody listens. Connections still in the listener's queue are reset
    instead."""
    with contextlib.suppress(httpx.TransportError):
        try:
            httpx.get(front.url + "/livez")
        except httpx.ConnectError:
            return True
    return False
