"""Retries of the released clients: they wait as long as the server asks them to, or do not
retry."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import anthropic
import openai
import pytest

from mayfly_protocol.serving import Failed, Rejected, Submit
from mayfly_server.http.api_keys import Key, from_environment
from support.doubles.fake_node import AnswerScript, FakeNode, FakeWorker, ScriptStep, answer_words
from support.running_front import RunningFront

Ask = Callable[[RunningFront], Any]
SECRET = "a-key-of-a-client"
REFUSED = 'mayfly_requests_total{model="tiny",outcome="503"}'
ANSWERED = 'mayfly_requests_total{model="tiny",outcome="200"}'


def by_openai(front: RunningFront) -> Any:
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key=SECRET, max_retries=3) as client:
        return client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}]
        )


def by_openai_as_a_stream(front: RunningFront) -> Any:
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key=SECRET, max_retries=3) as client:
        return list(client.responses.create(model="tiny", input="hi", stream=True))


def by_anthropic(front: RunningFront) -> Any:
    with anthropic.Anthropic(base_url=front.url, api_key=SECRET, max_retries=3) as client:
        return client.messages.create(
            model="tiny", max_tokens=5, messages=[{"role": "user", "content": "hi"}]
        )


clients = pytest.mark.parametrize("ask", [by_openai, by_openai_as_a_stream, by_anthropic])


@pytest.fixture
def node() -> Iterator[FakeNode]:
    with FakeNode("tiny") as node:
        yield node


def first(script: AnswerScript, *, then: AnswerScript) -> AnswerScript:
    """The first request gets the one, those after it the other."""
    seen: list[str] = []

    def either(submit: Submit) -> Iterator[ScriptStep]:
        seen.append(submit.rid)
        return (script if submit.rid == seen[0] else then)(submit)

    return either


def rids(worker: FakeWorker) -> set[str]:
    return {submit.rid for submit in worker.submits}


@clients
def test_a_full_server_is_asked_again_when_it_said(node: FakeNode, ask: Ask) -> None:
    def full(submit: Submit) -> Iterator[ScriptStep]:
        yield Rejected(submit.rid, submit.attempt, "full", "full", retry_after_s=2.0)

    worker = node.worker(first(full, then=answer_words()))
    with RunningFront(node.control) as front:
        before = time.monotonic()
        assert ask(front)
        assert time.monotonic() - before >= 2.0
    assert len(rids(worker)) == 2


@clients
def test_what_would_fail_again_is_not_asked_again(node: FakeNode, ask: Ask) -> None:
    def fails(submit: Submit) -> Iterator[ScriptStep]:
        yield Failed(submit.rid, submit.attempt, "metal_buffer_size", "too large")

    worker = node.worker(fails)
    with (
        RunningFront(node.control) as front,
        pytest.raises((openai.InternalServerError, anthropic.InternalServerError)),
    ):
        ask(front)
    assert len(rids(worker)) == 1


@clients
def test_a_wrong_request_is_not_asked_again(node: FakeNode, ask: Ask) -> None:
    def invalid(submit: Submit) -> Iterator[ScriptStep]:
        yield Rejected(submit.rid, submit.attempt, "invalid", "no", param="messages")

    worker = node.worker(invalid)
    with (
        RunningFront(node.control) as front,
        pytest.raises((openai.BadRequestError, anthropic.BadRequestError)),
    ):
        ask(front)
    assert len(rids(worker)) == 1


@clients
def test_a_model_that_is_being_loaded_is_waited_for(node: FakeNode, ask: Ask) -> None:
    """The front end holds no request here, so that the clients have to retry."""
    node.worker(answer_words(), state="loading", load_done=1, load_total=2, age_s=1.0)
    ready = replace(node.view("slot-1"), state="ready")
    with RunningFront(node.control, ready=False, queue_wait_s=0.0) as front:
        front.wait(lambda: "50 %" in front.client.get("/readyz").text)

        def come_up() -> None:
            front.wait(lambda: front.metric(REFUSED) > 0)
            node.show(ready)

        with ThreadPoolExecutor(1) as pool:
            up = pool.submit(come_up)
            assert ask(front)
            up.result()
        assert front.metric(ANSWERED) == 1


@clients
def test_a_key_that_has_sent_enough_is_slowed_down(node: FakeNode, ask: Ask) -> None:
    [key] = from_environment({"MAYFLY_API_KEYS": SECRET})
    limited = Key(key.name, key.digest, requests_per_minute=60)
    worker = node.worker(answer_words())
    with RunningFront(node.control, keys=[limited]) as front:
        headers = {"authorization": f"Bearer {SECRET}"}
        while front.client.get("/v1/models", headers=headers).status_code == 200:
            pass
        assert ask(front)
    assert len(rids(worker)) == 1
