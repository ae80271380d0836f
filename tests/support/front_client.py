"""Helpers for tests of the front end (the HTTP process) with a fake worker: scripts of the worker's
answers, and a client that sees both its HTTP requests and what reaches the worker."""

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
    """Runs a front end whose only worker, a fake one, answers every request by ``script``."""
    with FakeNode() as node:
        node.worker(script)
        with RunningFront(node.control, **settings) as front:
            yield front


def everything(submit: Submit) -> Iterator[ScriptStep]:
    """A fake worker's script: answers with reasoning, a text and two tool calls."""
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
    """A fake worker's script: answers with a token, then fails with an error text that clients must
    not see."""
    yield accept(submit)
    yield step(submit, 0, "a")
    yield Failed(submit.rid, submit.attempt, "metal_buffer_size", "/secret/path")


def prompt_of(front: RunningFront, node: FakeNode, path: str, asked: dict[str, Any]) -> ChatPrompt:
    """Sends an HTTP request to the front end and returns the chat prompt that the fake worker
    gets."""
    response = front.client.post(path, json=asked)
    assert response.status_code == 200, response.text
    prompt = node.workers[0].submits[-1].generation.prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def named_events(response: httpx.Response) -> list[dict[str, Any]]:
    """Returns the events of a stream without its comments; checks that each event's name (the line
    ``event:``) is its type."""
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in response.text.strip().split("\n\n"):
        if not block.startswith(":"):
            name, data = block.splitlines()
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
    return events


def check_error(response: httpx.Response, status: int, param: str | None) -> dict[str, Any]:
    """Checks that a response is a non-retryable error with this status, about the request field
    ``param``; returns the error object."""
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
    """An HTTP client of the front end that also checks what reaches the fake worker."""

    def __init__(self, http: httpx.Client, worker: FakeWorker) -> None:
        self.http = http
        self.worker = worker

    def post(self, path: str, **body: Any) -> httpx.Response:
        needed = HELLO if path == CHAT else {"prompt": "hi"}
        return self.http.post(path, json=needed | body)

    def taken(self, path: str, **body: Any) -> Submit:
        """Posts a request that has to be answered with 200; returns the message that the fake
        worker got for the request."""
        before = len(self.worker.submits)
        response = self.post(path, **body)
        assert response.status_code == 200, response.text
        assert len(self.worker.submits) > before
        return self.worker.submits[-1]

    def refused(self, path: str, param: str | None = None, **body: Any) -> dict[str, Any]:
        """Posts a request that has to be refused with 400 before anything reaches the fake worker;
        returns the error object."""
        before = len(self.worker.submits)
        response = self.post(path, **body)
        assert len(self.worker.submits) == before
        return check_error(response, 400, param or next(iter(body)))
