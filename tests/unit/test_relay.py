"""A request and the workers that come and go under it, over HTTP and real sockets."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from mayfly_protocol.serving import (
    Delta,
    Handover,
    Submit,
    Tokens,
)
from mayfly_server.dispatch.link import STALLED_S
from support.doubles.fake_node import (
    CARD,
    DIE,
    WORDS,
    AnswerScript,
    FakeNode,
    ScriptStep,
    accept,
    answer_then,
    answer_words,
    die,
    step,
    token_id,
)
from support.front_client import CHAT, HELLO, TEXT, WHOLE
from support.relay_requests import ask, events, pair, pieces, seen_usage, stream, submits
from support.running_front import RunningFront


@pytest.fixture
def node() -> Iterator[FakeNode]:
    with FakeNode() as node:
        yield node


@pytest.mark.parametrize("count", [0, 1, 3, 5])
def test_a_stream_goes_on_where_its_worker_died(node: FakeNode, count: int) -> None:
    pair(node, answer_then(count, die), answer_words())
    with RunningFront(node.control) as front:
        front.wait_workers(2)
        response = stream(front)
        assert pieces(response) == list(WORDS), "each word once, in order"
        assert seen_usage(response) == (7, len(WORDS))
        assert events(response)[-1] is None
        assert len({event["id"] for event in events(response)[:-1]}) == 1
        phase = "decode" if count else "queued"
        assert (
            front.metric(
                f'mayfly_continuations_total{{model="tiny",phase="{phase}",reason="lost"}}'
            )
            == 1
        )
    first, second = submits(node)
    assert (first.attempt, first.resume, second.attempt) == (1, (), 2)
    assert second.resume == ((tuple(map(token_id, range(count))),) if count else ())
    assert second.generation == first.generation
    assert second.rid == first.rid


def test_an_answer_in_one_piece_survives_too(node: FakeNode) -> None:
    pair(node, answer_then(2, die), answer_words())
    with RunningFront(node.control) as front:
        front.wait_workers(2)
        for path, body in {CHAT: HELLO, TEXT: {"prompt": "hi"}}.items():
            if path == TEXT:
                node.worker(node.workers[0].script, slot=node_slot(node))
                front.wait_workers(2)
            answer = front.client.post(path, json=body).json()
            choice = answer["choices"][0]
            text = choice["message"]["content"] if path == CHAT else choice["text"]
            assert (text, choice["finish_reason"]) == (WHOLE, "stop")
            assert answer["usage"]["completion_tokens"] == len(WORDS)


def node_slot(node: FakeNode) -> str:
    """The slot of the worker that has died."""
    dead = next(worker for worker in node.workers if worker._stop.is_set())
    return next(v.slot for v in node._roster.slots if v.endpoint == dead.endpoint)


def test_a_choice_that_had_ended_is_not_run_again(node: FakeNode) -> None:
    def first(submit: Submit) -> Iterator[ScriptStep]:
        yield accept(submit)
        yield step(submit, 0, "short", 0, finish="stop")
        yield step(submit, 0, WORDS[0], 1)
        yield DIE

    pair(node, first, answer_words())
    with RunningFront(node.control) as front:
        front.wait_workers(2)
        response = stream(front, n=2)
    assert (pieces(response, 0), pieces(response, 1)) == (["short"], list(WORDS))
    second = submits(node)[1]
    assert (second.resume, second.finished) == (((100,), (100,)), (0,))
    ends = [c["finish_reason"] for e in events(response)[:-1] for c in e["choices"]]
    assert sorted(filter(None, ends)) == ["stop", "stop"]


def test_lost_after_the_last_token_nothing_is_run_again(node: FakeNode) -> None:
    def no_farewell(submit: Submit) -> Iterator[ScriptStep]:
        yield accept(submit)
        yield step(submit, 0, "all", finish="stop")
        yield DIE

    pair(node, no_farewell, answer_words())
    with RunningFront(node.control) as front:
        front.wait_workers(2)
        response = stream(front)
        assert (pieces(response), seen_usage(response)) == (["all"], (7, 1))
    assert len(submits(node)) == 1


@pytest.mark.parametrize("position", [0, 2])
def test_a_repeat_or_a_gap_loses_the_worker(node: FakeNode, position: int) -> None:
    def wrong(submit: Submit) -> Iterator[ScriptStep]:
        yield step(submit, position, "wrong")
        yield 60.0

    pair(node, answer_then(1, wrong), answer_words())
    with RunningFront(node.control) as front:
        front.wait_workers(2)
        assert pieces(stream(front)) == list(WORDS)
        front.wait(lambda: any(worker.cancels for worker in node.workers))
    cancelled = [cancel for worker in node.workers for cancel in worker.cancels]
    assert [cancel.attempt for cancel in cancelled] == [1], "the worker is told to stop"


def test_what_a_left_worker_still_says_is_dropped(node: FakeNode) -> None:
    gate = threading.Event()

    def wrong(submit: Submit) -> Iterator[ScriptStep]:
        yield step(submit, 3, "wrong")
        yield Tokens((Delta(submit.rid, submit.attempt, 0, 1, (1,), "late"),))
        yield gate

    pair(node, answer_then(1, wrong), answer_words())
    with RunningFront(node.control) as front:
        front.wait_workers(2)
        assert pieces(stream(front)) == list(WORDS)
        gate.set()


def test_a_handover_is_continued_elsewhere(node: FakeNode) -> None:
    def drained(submit: Submit) -> Iterator[ScriptStep]:
        yield Handover(submit.rid, submit.attempt, "drain")

    pair(node, answer_then(2, drained), answer_words())
    with RunningFront(node.control) as front:
        front.wait_workers(2)
        assert pieces(stream(front)) == list(WORDS)
        assert (
            front.metric('mayfly_continuations_total{model="tiny",phase="decode",reason="drain"}')
            == 1
        )
    assert submits(node)[1].suspect is False


def test_a_worker_that_is_gone_from_the_roster_is_lost(node: FakeNode) -> None:
    """The reaper's verdict counts, not the exit."""

    def wedged(submit: Submit) -> Iterator[ScriptStep]:
        slot = next(v for v in node._roster.slots if v.endpoint.endswith(f"{named(submit)}.ipc"))
        node.show(replace(slot, state="gone"))
        yield 60.0

    def named(submit: Submit) -> str:
        worker = next(worker for worker in node.workers if submit in worker.submits)
        return worker.endpoint.rpartition("/")[2].removesuffix(".ipc")

    pair(node, answer_then(2, wedged), answer_words())
    with RunningFront(node.control) as front:
        front.wait_workers(2)
        assert pieces(stream(front)) == list(WORDS)


def test_a_silent_worker_is_lost(node: FakeNode) -> None:
    def mute(submit: Submit) -> Iterator[ScriptStep]:
        for worker in node.workers:
            worker.mute = submit in worker.submits
        yield 60.0

    pair(node, answer_then(2, mute), answer_words())
    with RunningFront(node.control, pong_wait_s=1.0) as front:
        front.wait_workers(2)
        assert pieces(stream(front)) == list(WORDS)


@pytest.mark.parametrize(
    ("stuck", "settings"),
    [
        (lambda submit: iter((60.0,)), {"accept_wait_s": 0.5}),
        (answer_then(0, lambda submit: iter((60.0,))), {"stall_s": 0.5}),
        (answer_then(2, lambda submit: iter((60.0,))), {"stall_s": 0.5}),
    ],
    ids=["not accepted", "no first token", "no next token"],
)
def test_R83_a_worker_that_never_replies(
    node: FakeNode, stuck: AnswerScript, settings: dict[str, float]
) -> None:
    _, script = pair(node, stuck, answer_words())
    for _ in range(2):  # for the healthy ones the bound is as short, and they may be paused
        node.worker(script)
    with RunningFront(node.control, keep_alive_s=0.1, **settings) as front:
        front.wait_workers(4)
        assert pieces(stream(front)) == list(WORDS)


def test_a_queued_request_may_wait_while_the_engine_moves(node: FakeNode) -> None:
    gate = threading.Event()

    def queued(submit: Submit) -> Iterator[ScriptStep]:
        yield accept(submit)
        yield gate
        yield from list(answer_words()(submit))[1:]

    worker = node.worker(queued)
    stall_s = 2.5
    with RunningFront(node.control, keep_alive_s=0.1, stall_s=stall_s) as front:
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(stream(front)))
        thread.start()
        front.wait(lambda: worker.submits)
        until_then = time.monotonic() + stall_s + 0.7
        while time.monotonic() < until_then:
            view = node.view("slot-1")
            node.show(replace(view, progress=view.progress + 1))
            time.sleep(0.1)
        gate.set()
        thread.join()
        assert pieces(answers[0]) == list(WORDS)
        assert ": waiting\n\n" in answers[0].text
    assert len(worker.submits) == 1


def test_a_worker_that_stands_still_is_asked_nothing_while_another_one_moves(
    node: FakeNode,
) -> None:
    still, moving = node.worker(answer_words()), node.worker(answer_words())
    with RunningFront(node.control) as front:

        def told(slot: str, detail: str, **view: Any) -> None:
            node.show(replace(node.view(slot), detail=detail, **view))
            front.wait(lambda: detail in front.client.get("/mayfly/status").text)

        front.wait_workers(2)
        told("slot-1", "has begun", running=1)
        time.sleep(STALLED_S + 0.2)  # what it is about: nothing happens there for long
        told("slot-2", "goes on", running=3, progress=5)
        for number in range(12):
            assert ask(front, f"question {number}").status_code == 200
        assert (len(still.submits), len(moving.submits)) == (0, 12)
        told("slot-1", "has moved", progress=1)
        for number in range(12):
            assert ask(front, f"question {number}").status_code == 200
        assert still.submits
        # One that stands still is better than none.
        node.show(replace(node.view("slot-2"), state="backoff", endpoint=""))
        front.wait_workers(1)
        assert ask(front).status_code == 200


def test_a_single_worker_server_survives_its_workers_death(node: FakeNode) -> None:
    """The stream is held, with signs of life, until the successor is ready."""
    node.worker(answer_then(2, die), slot="only")
    with RunningFront(node.control, keep_alive_s=0.1) as front:
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(stream(front)))
        thread.start()
        front.wait(lambda: front.metric("mayfly_continuations_total") == 1)
        node.show(replace(node.view("only"), state="backoff", endpoint="", retry_in_s=0.1))
        front.wait(lambda: front.client.get("/readyz").status_code == 503)
        node.worker(answer_words(), slot="only")
        thread.join()
    assert pieces(answers[0]) == list(WORDS)


def test_a_continuation_goes_to_the_same_model_only(node: FakeNode) -> None:
    node.worker(answer_then(2, die), slot="a")
    with RunningFront(node.control, failover_wait_s=0.5, keep_alive_s=0.1) as front:
        other = node.worker(answer_words(), slot="b", state="loading")
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(stream(front)))
        thread.start()
        front.wait(lambda: front.metric("mayfly_continuations_total") == 1)
        view = node.view("b")
        node.show(replace(view, state="ready", card=replace(CARD, digest="e" * 64)))
        thread.join()
        assert other.submits == []
        last = events(answers[0])[-1]
        assert last["error"]["code"] == "model_unavailable"
        assert last["error"]["retryable"] is True


def test_a_request_outlives_so_many_workers(node: FakeNode) -> None:
    for _ in range(3):
        node.worker(answer_then(1, die) if not node.workers else _die_resuming)
    with RunningFront(node.control, max_attempts=2, failover_wait_s=2.0) as front:
        front.wait_workers(3)
        last = events(stream(front))[-1]
    assert last["error"]["code"] == "workers_lost"
    assert last["error"]["retryable"] is True
    assert len(submits(node)) == 2


def _die_resuming(submit: Submit) -> Iterator[ScriptStep]:
    yield accept(submit)
    yield DIE
