"""A request and the workers that come and go under it, over HTTP and real sockets."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from mayfly_protocol.serving import (
    Delta,
    Failed,
    Finish,
    Handover,
    Progress,
    Rejected,
    Submit,
    Tokens,
)
from models.fake_engine import (
    CARD,
    DIE,
    WORDS,
    Act,
    FakeNode,
    FakeWorker,
    Script,
    accept,
    die,
    finish,
    say,
    step,
    token_id,
    until,
)
from models.running_front import RunningFront

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}
WHOLE = "".join(WORDS)


@pytest.fixture
def node() -> Iterator[FakeNode]:
    with FakeNode() as node:
        yield node


def events(response: httpx.Response) -> list[Any]:
    """A stream's events; [DONE] is None, comments are left out."""
    lines = [line for line in response.text.split("\n\n") if line.startswith("data: ")]
    data = [line.removeprefix("data: ") for line in lines]
    return [None if content == "[DONE]" else json.loads(content) for content in data]


def pieces(response: httpx.Response, choice: int = 0) -> list[str]:
    """The texts of one choice, by chunk."""
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


def pair(node: FakeNode, first: Script, second: Script) -> tuple[list[FakeWorker], Script]:
    """Two workers; whichever is asked first follows the first script, and so on."""
    scripts = [first, second]

    def next_script(submit: Submit) -> Iterator[Act]:
        return scripts[min(submit.attempt, 2) - 1](submit)

    return [node.worker(next_script), node.worker(next_script)], next_script


def submits(node: FakeNode) -> list[Submit]:
    found = [submit for worker in node.workers for submit in worker.submits]
    return sorted(found, key=lambda submit: submit.attempt)


def seen_usage(response: httpx.Response) -> tuple[int, int]:
    usage = events(response)[-2]["usage"]
    return usage["prompt_tokens"], usage["completion_tokens"]


@pytest.mark.parametrize("count", [0, 1, 3, 5])
def test_a_stream_goes_on_where_its_worker_died(node: FakeNode, count: int) -> None:
    pair(node, until(count, die), say())
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
    pair(node, until(2, die), say())
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
    def first(submit: Submit) -> Iterator[Act]:
        yield accept(submit)
        yield step(submit, 0, "short", 0, finish="stop")
        yield step(submit, 0, WORDS[0], 1)
        yield DIE

    pair(node, first, say())
    with RunningFront(node.control) as front:
        front.wait_workers(2)
        response = stream(front, n=2)
    assert (pieces(response, 0), pieces(response, 1)) == (["short"], list(WORDS))
    second = submits(node)[1]
    assert (second.resume, second.finished) == (((100,), (100,)), (0,))
    ends = [c["finish_reason"] for e in events(response)[:-1] for c in e["choices"]]
    assert sorted(filter(None, ends)) == ["stop", "stop"]


def test_lost_after_the_last_token_nothing_is_run_again(node: FakeNode) -> None:
    def no_farewell(submit: Submit) -> Iterator[Act]:
        yield accept(submit)
        yield step(submit, 0, "all", finish="stop")
        yield DIE

    pair(node, no_farewell, say())
    with RunningFront(node.control) as front:
        front.wait_workers(2)
        response = stream(front)
        assert (pieces(response), seen_usage(response)) == (["all"], (7, 1))
    assert len(submits(node)) == 1


@pytest.mark.parametrize("position", [0, 2])
def test_a_repeat_or_a_gap_loses_the_worker(node: FakeNode, position: int) -> None:
    def wrong(submit: Submit) -> Iterator[Act]:
        yield step(submit, position, "wrong")
        yield 60.0

    pair(node, until(1, wrong), say())
    with RunningFront(node.control) as front:
        front.wait_workers(2)
        assert pieces(stream(front)) == list(WORDS)
    cancelled = [cancel for worker in node.workers for cancel in worker.cancels]
    assert [cancel.attempt for cancel in cancelled] == [1], "the worker is told to stop"


def test_what_a_left_worker_still_says_is_dropped(node: FakeNode) -> None:
    gate = threading.Event()

    def wrong(submit: Submit) -> Iterator[Act]:
        yield step(submit, 3, "wrong")
        yield Tokens((Delta(submit.rid, submit.attempt, 0, 1, (1,), "late"),))
        yield gate

    pair(node, until(1, wrong), say())
    with RunningFront(node.control) as front:
        front.wait_workers(2)
        assert pieces(stream(front)) == list(WORDS)
        gate.set()


def test_a_handover_is_continued_elsewhere(node: FakeNode) -> None:
    def drained(submit: Submit) -> Iterator[Act]:
        yield Handover(submit.rid, submit.attempt, "drain")

    pair(node, until(2, drained), say())
    with RunningFront(node.control) as front:
        front.wait_workers(2)
        assert pieces(stream(front)) == list(WORDS)
        assert (
            front.metric('mayfly_continuations_total{model="tiny",phase="decode",reason="drain"}')
            == 1
        )
    assert submits(node)[1].suspect is False


def test_a_worker_that_is_gone_from_the_roster_is_lost(node: FakeNode) -> None:
    """At the reaper's verdict, not at the exit."""

    def wedged(submit: Submit) -> Iterator[Act]:
        slot = next(v for v in node._roster.slots if v.endpoint.endswith(f"{named(submit)}.ipc"))
        node.show(replace(slot, state="gone"))
        yield 60.0

    def named(submit: Submit) -> str:
        worker = next(worker for worker in node.workers if submit in worker.submits)
        return worker.endpoint.rpartition("/")[2].removesuffix(".ipc")

    pair(node, until(2, wedged), say())
    with RunningFront(node.control) as front:
        front.wait_workers(2)
        assert pieces(stream(front)) == list(WORDS)


def test_a_silent_worker_is_lost(node: FakeNode) -> None:
    def mute(submit: Submit) -> Iterator[Act]:
        for worker in node.workers:
            worker.mute = submit in worker.submits
        yield 60.0

    pair(node, until(2, mute), say())
    with RunningFront(node.control, pong_wait_s=1.0) as front:
        front.wait_workers(2)
        assert pieces(stream(front)) == list(WORDS)


@pytest.mark.parametrize(
    ("stuck", "settings"),
    [
        (lambda submit: iter((60.0,)), {"accept_wait_s": 0.2}),
        (until(0, lambda submit: iter((60.0,))), {"stall_s": 0.2}),
        (until(2, lambda submit: iter((60.0,))), {"stall_s": 0.2}),
    ],
    ids=["not accepted", "no first token", "no next token"],
)
def test_R83_a_worker_that_never_replies(
    node: FakeNode, stuck: Script, settings: dict[str, float]
) -> None:
    pair(node, stuck, say())
    with RunningFront(node.control, keep_alive_s=0.1, **settings) as front:
        front.wait_workers(2)
        assert pieces(stream(front)) == list(WORDS)


def test_a_queued_request_may_wait_while_the_engine_moves(node: FakeNode) -> None:
    gate = threading.Event()

    def queued(submit: Submit) -> Iterator[Act]:
        yield accept(submit)
        yield gate
        yield from list(say()(submit))[1:]

    worker = node.worker(queued)
    with RunningFront(node.control, keep_alive_s=0.1, stall_s=0.5) as front:
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(stream(front)))
        thread.start()
        front.wait(lambda: worker.submits)
        until_then = time.monotonic() + 1.5
        while time.monotonic() < until_then:
            view = node.view("slot-1")
            node.show(replace(view, progress=view.progress + 1))
            time.sleep(0.1)
        gate.set()
        thread.join()
        assert pieces(answers[0]) == list(WORDS)
        assert ": waiting\n\n" in answers[0].text
    assert len(worker.submits) == 1


def test_a_single_worker_server_survives_its_workers_death(node: FakeNode) -> None:
    """The stream is held, with signs of life, until the successor is ready."""
    node.worker(until(2, die), slot="only")
    with RunningFront(node.control, keep_alive_s=0.1) as front:
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(stream(front)))
        thread.start()
        front.wait(lambda: front.metric("mayfly_continuations_total") == 1)
        node.show(replace(node.view("only"), state="backoff", endpoint="", retry_in_s=0.1))
        front.wait(lambda: front.client.get("/readyz").status_code == 503)
        node.worker(say(), slot="only")
        thread.join()
    assert pieces(answers[0]) == list(WORDS)


def test_a_continuation_goes_to_the_same_model_only(node: FakeNode) -> None:
    node.worker(until(2, die), slot="a")
    with RunningFront(node.control, failover_wait_s=0.5, keep_alive_s=0.1) as front:
        other = node.worker(say(), slot="b", state="loading")
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
        node.worker(until(1, die) if not node.workers else _die_resuming)
    with RunningFront(node.control, max_attempts=2, failover_wait_s=2.0) as front:
        front.wait_workers(3)
        last = events(stream(front))[-1]
    assert last["error"]["code"] == "workers_lost"
    assert last["error"]["retryable"] is True
    assert len(submits(node)) == 2


def _die_resuming(submit: Submit) -> Iterator[Act]:
    yield accept(submit)
    yield DIE


# Refusals


def rejecting(reason: Any, **more: Any) -> Script:
    def script(submit: Submit) -> Iterator[Act]:
        yield Rejected(submit.rid, submit.attempt, reason, "because", **more)

    return script


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


def test_one_that_is_full_or_leaving_is_passed_over(node: FakeNode) -> None:
    pair(node, rejecting("full", retry_after_s=1.0), say())
    node.worker(rejecting("leaving"))
    with RunningFront(node.control) as front:
        front.wait_workers(3)
        assert pieces(stream(front)) == list(WORDS)


def test_R69_a_fault_of_its_own(node: FakeNode) -> None:
    def failing(submit: Submit) -> Iterator[Act]:
        yield Failed(submit.rid, submit.attempt, "metal_buffer_size", "File /Users/me")

    worker = node.worker(until(0, failing))
    with RunningFront(node.control) as front:
        response = front.client.post(CHAT, json=HELLO)
        assert (response.status_code, response.headers["x-should-retry"]) == (500, "false")
        assert response.json()["error"]["code"] == "metal_buffer_size"
        assert "Users" not in response.text
        worker.script = until(2, failing)
        response = stream(front)
        assert pieces(response) == list(WORDS[:2])
        assert events(response)[-1]["error"]["code"] == "metal_buffer_size"
        assert "[DONE]" not in response.text
        assert '"finish_reason":"' not in response.text
    assert len(worker.submits) == 2


def test_R69_an_end_without_an_end(node: FakeNode) -> None:
    """A worker that finishes without having ended its choices is no success."""

    def cut_short(submit: Submit) -> Iterator[Act]:
        yield Finish(submit.rid, submit.attempt, "done")

    pair(node, until(2, cut_short), say())
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
    node.worker(say(), state="loading")
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
    node.worker(say(), state="loading", load_done=1, load_total=3, age_s=4.0)
    with RunningFront(node.control, ready=False, queue_wait_s=0.3) as front:
        response = front.client.post(CHAT, json=HELLO)
        assert (response.status_code, response.headers["retry-after"]) == (503, "8")
        assert "33 %" in response.json()["error"]["message"]


def test_no_node_was_ever_heard() -> None:
    with RunningFront("ipc:///tmp/no-such-node/node.ipc", ready=False, queue_wait_s=0.2) as front:
        response = front.client.post(CHAT, json=HELLO)
        assert response.status_code == 503
        assert front.client.get("/v1/models").json()["data"] == []


# Clients


@pytest.mark.parametrize("streamed", [False, True])
def test_R70_R71_a_client_that_goes_away_is_cancelled(node: FakeNode, streamed: bool) -> None:
    worker = node.worker(until(1, lambda submit: iter((60.0,))))
    with RunningFront(node.control) as front:
        with pytest.raises(httpx.ReadTimeout):
            front.client.post(CHAT, json=HELLO | {"stream": streamed}, timeout=0.3)
        front.wait(lambda: worker.cancels)
        front.wait(lambda: front.metric("mayfly_num_requests_") == 0)
        assert front.metric('mayfly_requests_total{model="tiny",outcome="cancelled"}') == 1
    assert worker.cancels[0].rid == worker.submits[0].rid


def test_a_client_that_goes_away_while_it_is_held(node: FakeNode) -> None:
    worker = node.worker(say(), state="loading")
    with RunningFront(node.control, ready=False) as front:
        with pytest.raises(httpx.ReadTimeout):
            front.client.post(CHAT, json=HELLO, timeout=0.3)
        front.wait(lambda: front.metric("mayfly_num_requests_") == 0)
    assert worker.submits == []


def test_several_prompts_are_cancelled_together(node: FakeNode) -> None:
    worker = node.worker(until(1, lambda submit: iter((60.0,))))
    with RunningFront(node.control) as front:
        with pytest.raises(httpx.ReadTimeout):
            body = {"prompt": ["a", "b", "c"], "stream": True}
            front.client.post(TEXT, json=body, timeout=0.3)
        front.wait(lambda: len(worker.cancels) == 3)


def test_one_bad_prompt_of_several_refuses_the_request(node: FakeNode) -> None:
    def picky(submit: Submit) -> Iterator[Act]:
        bad = submit.rid.endswith("-1")
        return (rejecting("invalid") if bad else until(1, lambda _: iter((60.0,))))(submit)

    worker = node.worker(picky)
    with RunningFront(node.control) as front:
        body = {"prompt": ["a", "b", "c"], "stream": True}
        response = front.client.post(TEXT, json=body)
        assert (response.status_code, response.json()["error"]["message"]) == (400, "because")
        front.wait(lambda: len(worker.cancels) == 2)


def test_R47_signs_of_life_are_comments(node: FakeNode) -> None:
    begun, seen = threading.Event(), threading.Event()

    def slow(submit: Submit) -> Iterator[Act]:
        yield Progress(submit.rid, submit.attempt, 256, 2048)  # too early to speak of
        yield begun
        yield Progress(submit.rid, submit.attempt, 512, 2048)
        yield seen
        yield step(submit, 0, "late", finish="stop")
        yield finish(submit)

    node.worker(until(0, slow))
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

    def gated(submit: Submit) -> Iterator[Act]:
        yield gate
        yield step(submit, 1, " two", finish="stop")
        yield finish(submit)

    node.worker(until(1, gated))
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
    node.worker(until(1, lambda submit: iter((60.0,))))
    with RunningFront(node.control, grace_s=0.3) as front:
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(stream(front)))
        thread.start()
        front.wait(lambda: front.metric("mayfly_time_to_first_token_seconds_count") == 1)
        front.stop()
        thread.join()
    assert events(answers[0])[-1]["error"]["code"] == "shutting_down"
