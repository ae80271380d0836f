"""Helpers for tests of requests that move between workers: send a request to a front end with fake
workers, and take its answer apart."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx

from mayfly_protocol.serving import (
    Rejected,
    Submit,
)
from support.doubles.fake_node import AnswerScript, FakeNode, FakeWorker, ScriptStep
from support.front_client import CHAT, HELLO
from support.running_front import RunningFront


@contextlib.contextmanager
def unread(front: RunningFront, path: str, body: Any) -> Iterator[socket.socket]:
    """Opens a connection, sends a request on it, and does not read the answer; yields the
    socket."""
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", front.port))
        client.sendall(head.encode() + content)
        yield client


def ask(front: RunningFront, text: str = "hi", **body: Any) -> httpx.Response:
    asked = {"messages": [{"role": "user", "content": text}], "seed": 1} | body
    return front.client.post(CHAT, json=asked)


def content(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def events(response: httpx.Response) -> list[Any]:
    """Returns the events of a stream's answer without its comments; the last, [DONE], is None."""
    lines = [line for line in response.text.split("\n\n") if line.startswith("data: ")]
    data = [line.removeprefix("data: ") for line in lines]
    return [None if content == "[DONE]" else json.loads(content) for content in data]


def pieces(response: httpx.Response, choice: int = 0) -> list[str]:
    """Returns the pieces of one choice's text, one for each chunk of the stream that has text."""
    return [
        piece["delta"]["content"]
        for event in events(response)
        for piece in (event or {}).get("choices", [])
        if piece["index"] == choice and piece["delta"].get("content")
    ]


def stream(front: RunningFront, **body: Any) -> httpx.Response:
    asked = HELLO | {"stream": True, "stream_options": {"include_usage": True}} | body
    response = front.client.post(CHAT, json=asked)
    assert response.status_code == 200, response.text
    return response


def pair(
    node: FakeNode, first: AnswerScript, second: AnswerScript
) -> tuple[list[FakeWorker], AnswerScript]:
    """Starts two fake workers on a node. The worker that gets a request first follows the script
    ``first``, the worker that gets the request afterwards the script ``second``. Returns the
    workers and the script that both follow."""
    scripts = [first, second]

    def next_script(submit: Submit) -> Iterator[ScriptStep]:
        return scripts[min(submit.attempt, 2) - 1](submit)

    return [node.worker(next_script), node.worker(next_script)], next_script


def submits(node: FakeNode) -> list[Submit]:
    found = [submit for worker in node.workers for submit in worker.submits]
    return sorted(found, key=lambda submit: submit.attempt)


def seen_usage(response: httpx.Response) -> tuple[int, int]:
    usage = events(response)[-2]["usage"]
    return usage["prompt_tokens"], usage["completion_tokens"]


def rejecting(reason: Any, **more: Any) -> AnswerScript:
    def script(submit: Submit) -> Iterator[ScriptStep]:
        yield Rejected(submit.rid, submit.attempt, reason, "because", **more)

    return script
