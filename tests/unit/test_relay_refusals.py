"""Refusals and failures of workers, and missing workers, as a client sees them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs
from structlog.typing import EventDict

from mayfly_protocol.serving import (
    Failed,
    Finish,
    Submit,
)
from support.doubles.fake_node import WORDS, FakeNode, ScriptStep, answer_then, answer_words
from support.front_client import CHAT, HELLO
from support.relay_requests import events, pair, pieces, rejecting, stream, submits
from support.running_front import RunningFront


@pytest.fixture
def node() -> Iterator[FakeNode]:
    with FakeNode() as node:
        yield node


@pytest.mark.parametrize("streamed", [False, True])
def test_an_invalid_request_keeps_its_status(node: FakeNode, streamed: bool) -> None:
    code = "context_length_exceeded"
    node.worker(rejecting("invalid", param="messages", code=code))
    with RunningFront(node.control) as front:
        response = front.client.post(CHAT, json=HELLO | {"stream": streamed})
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["message"], error["param"], error["code"]) == ("because", "messages", code)


def test_full_everywhere_is_429(node: FakeNode) -> None:
    node.worker(rejecting("full", retry_after_s=7.0))
    node.worker(rejecting("full", retry_after_s=3.2))
    with RunningFront(node.control) as front:
        front.wait_workers(2)
        response = front.client.post(CHAT, json=HELLO | {"stream": True})
        assert (response.status_code, response.headers["retry-after"]) == (429, "4")
        assert response.headers["x-should-retry"] == "true"
        assert response.json()["error"]["retryable"] is True
    assert [submit.attempt for submit in submits(node)] == [1, 2]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "x" * 9000}]}),
        ("/tokenize", {"prompt": "x" * 9000}),
    ],
)
def test_what_no_worker_reads_is_not_sent(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """Such a message would cut the connection of every other request at that worker, again and
    again."""
    gate = threading.Event()
    worker = node.worker(lambda submit: chain((gate,), answer_words()(submit)))
    monkeypatch.setattr("mayfly_server.dispatch.link.MAX_FRAME_BYTES", 8192)
    with RunningFront(node.control) as front, ThreadPoolExecutor(1) as pool:
        other = pool.submit(front.client.post, CHAT, json=HELLO)
        front.wait(lambda: worker.submits)
        response = front.client.post(path, json=body)
        gate.set()
        assert response.status_code == 413
        assert response.json()["error"]["retryable"] is False
        assert other.result().status_code == 200
    assert len(worker.submits) == 1


BUSY = ": its workers are busy, or did not answer in time."


def test_a_worker_that_does_not_answer_is_not_being_connected_to(node: FakeNode) -> None:
    node.worker(lambda submit: iter((60.0,)))
    with RunningFront(node.control, accept_wait_s=0.2, queue_wait_s=0.4, keep_alive_s=0.1) as front:
        response = front.client.post(CHAT, json=HELLO)
        assert response.status_code == 503
        assert response.json()["error"]["message"].endswith(BUSY)


def test_one_that_is_full_or_leaving_is_passed_over(node: FakeNode) -> None:
    pair(node, rejecting("full", retry_after_s=1.0), answer_words())
    node.worker(rejecting("leaving"))
    with RunningFront(node.control) as front:
        front.wait_workers(3)
        assert pieces(stream(front)) == list(WORDS)


def test_R69_a_fault_of_its_own(node: FakeNode) -> None:
    def failing(submit: Submit) -> Iterator[ScriptStep]:
        yield Failed(submit.rid, submit.attempt, "metal_buffer_size", "File /Users/me")

    worker = node.worker(answer_then(0, failing))
    with RunningFront(node.control) as front:
        response = front.client.post(CHAT, json=HELLO)
        assert (response.status_code, response.headers["x-should-retry"]) == (500, "false")
        assert response.json()["error"]["code"] == "metal_buffer_size"
        assert "Users" not in response.text
        worker.script = answer_then(2, failing)
        response = stream(front)
        assert pieces(response) == list(WORDS[:2])
        assert events(response)[-1]["error"]["code"] == "metal_buffer_size"
        assert "[DONE]" not in response.text
        assert '"finish_reason":"' not in response.text
    assert len(worker.submits) == 2


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("after", [0, 2])
def test_B09_a_request_that_fails_leaves_one_line_with_its_first_cause(
    node: FakeNode, after: int, streamed: bool
) -> None:
    def failing(submit: Submit) -> Iterator[ScriptStep]:
        text = f"[malloc] Unable to allocate 9 bytes for '{'secret ' * 20}'\nand more"
        yield Failed(submit.rid, submit.attempt, "metal_buffer_size", text)

    node.worker(answer_then(after, failing))
    with RunningFront(node.control) as front, capture_logs() as logged:
        asked = {**HELLO, "stream": streamed}
        response = front.client.post(CHAT, json=asked, headers={"x-request-id": "one-of-9"})
        assert "malloc" not in response.text
        front.wait(lambda: failures(logged))
    assert failures(logged) == [
        {
            "event": "request failed",
            "log_level": "error",
            "kind": "metal_buffer_size",
            "first_cause": "[malloc] Unable to allocate 9 bytes for '(140 characters)'",
        }
    ]


def test_B09_a_question_that_fails_leaves_one_line_with_its_first_cause(node: FakeNode) -> None:
    node.worker(answer_words()).failure = "the worker could not tokenize"
    with RunningFront(node.control) as front, capture_logs() as logged:
        assert front.client.post("/tokenize", json={"prompt": "a"}).status_code == 500
        front.wait(lambda: failures(logged))
    assert [line["first_cause"] for line in failures(logged)] == ["the worker could not tokenize"]


def failures(logged: list[EventDict]) -> list[EventDict]:
    return [line for line in logged if line["event"] == "request failed"]


def test_R69_an_end_without_an_end(node: FakeNode) -> None:
    """A worker that finishes without having ended its choices is no success."""

    def cut_short(submit: Submit) -> Iterator[ScriptStep]:
        yield Finish(submit.rid, submit.attempt, "done")

    pair(node, answer_then(2, cut_short), answer_words())
    with RunningFront(node.control) as front:
        front.wait_workers(2)
        assert pieces(stream(front)) == list(WORDS)


def test_nothing_ready_and_nothing_loading(node: FakeNode) -> None:
    node.worker(state="failed")
    with RunningFront(node.control, ready=False) as front:
        response = front.client.post(CHAT, json=HELLO)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "model_failed"
        assert int(response.headers["retry-after"]) >= 1
        view = replace(node.view("slot-1"), state="backoff", retry_in_s=250.0)
        node.show(view)
        front.wait(lambda: "pause" in front.client.get("/readyz").text)
        response = front.client.post(CHAT, json=HELLO)
        assert (response.status_code, response.headers["retry-after"]) == (503, "255")


def test_a_request_is_held_while_the_model_loads(node: FakeNode) -> None:
    node.worker(answer_words(), state="loading")
    with RunningFront(node.control, ready=False) as front:
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(stream(front)))
        thread.start()
        front.wait(lambda: front.metric("mayfly_num_requests_") == 1)
        assert not answers
        node.show(replace(node.view("slot-1"), state="ready"))
        thread.join()
        assert pieces(answers[0]) == list(WORDS)


def test_a_request_is_not_held_for_ever(node: FakeNode) -> None:
    node.worker(answer_words(), state="loading", load_done=1, load_total=3, age_s=4.0)
    with RunningFront(node.control, ready=False, queue_wait_s=0.3) as front:
        response = front.client.post(CHAT, json=HELLO)
        assert (response.status_code, response.headers["retry-after"]) == (503, "8")
        assert "33 %" in response.json()["error"]["message"]


def test_no_node_was_ever_heard() -> None:
    with RunningFront("ipc:///tmp/no-such-node/node.ipc", ready=False, queue_wait_s=0.2) as front:
        response = front.client.post(CHAT, json=HELLO)
        assert response.status_code == 503
        assert front.client.get("/v1/models").json()["data"] == []


def test_a_model_that_another_node_may_serve_is_not_denied(node: FakeNode) -> None:
    """The front end was started again, and has heard from one of its nodes only."""
    node.worker()
    later = FakeNode("big", name="later")
    with RunningFront(node.control, later.control) as front:
        asked = HELLO | {"model": "big"}
        response = front.client.post(CHAT, json=asked)
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert response.json()["error"]["retryable"] is True
        assert front.client.post(CHAT, json=HELLO | {"model": "tiny"}).status_code == 200
        with later:
            later.worker()
            front.wait_workers(2)
            assert front.client.post(CHAT, json=asked).status_code == 200
            assert front.client.post(CHAT, json=asked | {"model": "other"}).status_code == 404
