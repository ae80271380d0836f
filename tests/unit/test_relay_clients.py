"""Clients that go away, wait, or read tokens as they are generated."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from mayfly_protocol.serving import (
    Progress,
    Submit,
)
from support.doubles.fake_node import FakeNode, ScriptStep, answer_then, answer_words, finish, step
from support.front_client import CHAT, HELLO, TEXT
from support.relay_requests import events, rejecting, stream, unread
from support.running_front import RunningFront


@pytest.fixture
def node() -> Iterator[FakeNode]:
    with FakeNode() as node:
        yield node


@pytest.mark.parametrize("streamed", [False, True])
def test_R70_R71_a_client_that_goes_away_is_cancelled(node: FakeNode, streamed: bool) -> None:
    worker = node.worker(answer_then(1, lambda submit: iter((60.0,))))
    with RunningFront(node.control) as front:
        with unread(front, CHAT, HELLO | {"stream": streamed}):
            front.wait(lambda: worker.submits)
        front.wait(lambda: worker.cancels)
        front.wait(lambda: front.metric("mayfly_num_requests_") == 0)
        assert front.metric('mayfly_requests_total{model="tiny",outcome="cancelled"}') == 1
    assert worker.cancels[0].rid == worker.submits[0].rid


def test_a_client_that_goes_away_while_it_is_held(node: FakeNode) -> None:
    worker = node.worker(answer_words(), state="loading")
    with RunningFront(node.control, ready=False) as front:
        with unread(front, CHAT, HELLO):
            front.wait(lambda: front.metric("mayfly_num_requests_") == 1)
        front.wait(lambda: front.metric("mayfly_num_requests_") == 0)
    assert worker.submits == []


def test_several_prompts_are_cancelled_together(node: FakeNode) -> None:
    worker = node.worker(answer_then(1, lambda submit: iter((60.0,))))
    with RunningFront(node.control) as front:
        with unread(front, TEXT, {"prompt": ["a", "b", "c"], "stream": True}):
            front.wait(lambda: len(worker.submits) == 3)
        front.wait(lambda: len(worker.cancels) == 3)


def test_one_bad_prompt_of_several_refuses_the_request(node: FakeNode) -> None:
    def picky(submit: Submit) -> Iterator[ScriptStep]:
        bad = submit.rid.endswith("-1")
        return (rejecting("invalid") if bad else answer_then(1, lambda _: iter((60.0,))))(submit)

    worker = node.worker(picky)
    with RunningFront(node.control) as front:
        body = {"prompt": ["a", "b", "c"], "stream": True}
        response = front.client.post(TEXT, json=body)
        assert (response.status_code, response.json()["error"]["message"]) == (400, "because")
        front.wait(lambda: len(worker.cancels) == 2)


def test_R47_signs_of_life_are_comments(node: FakeNode) -> None:
    begun, seen = threading.Event(), threading.Event()

    def slow(submit: Submit) -> Iterator[ScriptStep]:
        yield Progress(submit.rid, submit.attempt, 256, 2048)  # too early to speak of
        yield begun
        yield Progress(submit.rid, submit.attempt, 512, 2048)
        yield seen
        yield step(submit, 0, "late", finish="stop")
        yield finish(submit)

    node.worker(answer_then(0, slow))
    with RunningFront(node.control) as front:
        body = HELLO | {"stream": True}
        with front.client.stream("POST", CHAT, json=body) as response:
            time.sleep(1.1)  # a second of silence, counted from the response's head
            begun.set()
            lines = (line for line in response.iter_lines() if line)
            assert next(lines) == ": 512 of 2048 prompt tokens"
            seen.set()
            first = json.loads(next(lines).removeprefix("data: "))
    assert first["choices"][0]["delta"]["role"] == "assistant"


def test_R34_words_arrive_as_they_are_said(node: FakeNode) -> None:
    gate = threading.Event()

    def gated(submit: Submit) -> Iterator[ScriptStep]:
        yield gate
        yield step(submit, 1, " two", finish="stop")
        yield finish(submit)

    node.worker(answer_then(1, gated))
    with RunningFront(node.control) as front:
        body = HELLO | {"stream": True}
        with front.client.stream("POST", CHAT, json=body) as response:
            arrived = response.iter_text()
            seen = ""
            while "One" not in seen:
                seen += next(arrived)
            assert "two" not in seen
            gate.set()
            assert " two" in "".join(arrived)


def test_streams_end_within_a_bound_when_the_server_is_stopped(node: FakeNode) -> None:
    node.worker(answer_then(1, lambda submit: iter((60.0,))))
    with RunningFront(node.control, grace_s=1.0) as front:
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(stream(front)))
        thread.start()
        front.wait(lambda: front.metric("mayfly_time_to_first_token_seconds_count") == 1)
        front.stop()
        thread.join()
    assert events(answers[0])[-1]["error"]["code"] == "shutting_down"
