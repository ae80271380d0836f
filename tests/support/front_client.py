"""A front end with a fake worker behind it, and a client that compares the requests of both
sides."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from mayfly_protocol.requests import ChatPrompt
from mayfly_protocol.serving import Failed, Submit, ToolCallDelta
from support.doubles.fake_node import (
    WORDS,
    AnswerScript,
    FakeNode,
    FakeWorker,
    ScriptStep,
    accept,
    finish,
    step,
)
from support.running_front import RunningFront

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "hi"}
HELLO: dict[str, Any] = {"messages": [USER]}
TOOL = {"type": "function", "function": {"name": "sum", "parameters": {"type": "object"}}}
WHOLE = "".join(WORDS)


@contextmanager
def following(script: AnswerScript, **settings: Any) -> Iterator[RunningFront]:
    """Runs a front end whose only worker follows a script."""
    with FakeNode() as node:
        node.worker(script)
        with RunningFront(node.control, **settings) as front:
            yield front


def everything(submit: Submit) -> Iterator[ScriptStep]:
    """Script of a thought, a text and two tool calls."""
    yield accept(submit)
    yield step(submit, 0, "", reasoning="Hm")
    yield step(submit, 1, "", reasoning=".")
    yield step(submit, 2, "I")
    yield step(submit, 3, " see")
    yield step(submit, 4, "", tool_calls=(ToolCallDelta(0, '{"x":', "c1", "sum"),))
    yield step(submit, 5, "", tool_calls=(ToolCallDelta(0, "1}"),))
    calls = (ToolCallDelta(1, "{}", "c2", "glob"),)
    yield step(submit, 6, "", tool_calls=calls, finish="tool_calls")
    yield finish(submit, 7)


def breaking(submit: Submit) -> Iterator[ScriptStep]:
    """Script of a token, and a fault whose text is not meant for clients."""
    yield accept(submit)
    yield step(submit, 0, "a")
    yield Failed(submit.rid, submit.attempt, "metal_buffer_size", "/secret/path")


def prompt_of(front: RunningFront, node: FakeNode, path: str, asked: dict[str, Any]) -> ChatPrompt:
    """Returns the chat prompt that the worker gets for a request."""
    response = front.client.post(path, json=asked)
    assert response.status_code == 200, response.text
    prompt = node.workers[0].submits[-1].generation.prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def named_events(response: httpx.Response) -> list[dict[str, Any]]:
    """Returns a stream's events, each of which has its type as its name, too; comments are left
    out."""
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in response.text.strip().split("\n\n"):
        if not block.startswith(":"):
            name, data = block.splitlines()
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
    return events


def check_error(response: httpx.Response, status: int, param: str | None) -> dict[str, Any]:
    """Returns the error of a request that could never be answered."""
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code", "retryable"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["message"]
    assert error["retryable"] is False
    assert "retry-after" not in response.headers
    return error


class Client:
    """A client of the front end that knows the requests that reached the worker."""

    def __init__(self, http: httpx.Client, worker: FakeWorker) -> None:
        self.http = http
        self.worker = worker

    def post(self, path: str, **body: Any) -> httpx.Response:
        needed = HELLO if path == CHAT else {"prompt": "hi"}
        return self.http.post(path, json=needed | body)

    def taken(self, path: str, **body: Any) -> Submit:
        """Posts a request that has to be answered, and returns the worker's part of it."""
        before = len(self.worker.submits)
        response = self.post(path, **body)
        assert response.status_code == 200, response.text
        assert len(self.worker.submits) > before
        return self.worker.submits[-1]

    def refused(self, path: str, param: str | None = None, **body: Any) -> dict[str, Any]:
        """Returns the error of a request that has to be refused without a request to the worker."""
        before = len(self.worker.submits)
        response = self.post(path, **body)
        assert len(self.worker.submits) == before
        return check_error(response, 400, param or next(iter(body)))
