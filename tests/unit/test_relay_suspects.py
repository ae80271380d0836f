"""A request that kills workers, and requests beside it: over HTTP and real sockets."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from mayfly_protocol.serving import Handover, Submit
from mayfly_server.dispatch.quarantine import SUSPECT
from mayfly_server.dispatch.relay import BYSTANDER
from mayfly_server.http.api_keys import Key, digest_of
from support.doubles.fake_node import DIE, WORDS, FakeNode, ScriptStep, accept, answer_words, step
from support.front_client import WHOLE
from support.relay_requests import ask, content, submits
from support.running_front import RunningFront


@pytest.fixture
def node() -> Iterator[FakeNode]:
    with FakeNode() as node:
        yield node


def says(submit: Submit, word: str) -> bool:
    return word in str(submit.generation.prompt)


def handing_over(kind: str, **fields: Any) -> Any:
    """Gives back what has the word "poison" in its prompt, says the usual to others."""

    def script(submit: Submit) -> Iterator[ScriptStep]:
        if not says(submit, "poison"):
            return answer_words()(submit)
        return iter((accept(submit), Handover(submit.rid, submit.attempt, kind, **fields)))

    return script


def slot_of(node: FakeNode, submit: Submit) -> str:
    worker = next(worker for worker in node.workers if submit in worker.submits)
    return next(v.slot for v in node._roster.slots if v.endpoint == worker.endpoint)


def test_a_request_that_breaks_the_batch_gets_that_faults_own_error(node: FakeNode) -> None:
    """The worker stays: it is asked again, the third time under a flag."""
    worker = node.worker(handing_over("shape", suspect=True, stays=True))
    with RunningFront(node.control) as front:
        response = ask(front, "poison")
        assert (response.status_code, response.headers["x-should-retry"]) == (500, "false")
        error = response.json()["error"]
        assert (error["code"], error["retryable"]) == ("shape", False)
        assert [submit.suspect for submit in worker.submits] == [False, False, True]
        assert content(ask(front)) == WHOLE
        assert front.metric("mayfly_quarantined_total") == 1


def test_the_condemned_is_refused_by_every_front_end_until_it_is_released(node: FakeNode) -> None:
    node.worker(handing_over("shape", suspect=True, stays=True))
    with RunningFront(node.control) as one, RunningFront(node.control) as other:
        ask(one, "poison")
        other.wait(lambda: other.front.fleet.quarantined())
        for front in (one, other):
            for seed in (1, 2):
                refused = ask(front, "poison", seed=seed)
                assert (refused.status_code, refused.headers["x-should-retry"]) == (500, "false")
                assert refused.json()["error"]["code"] == "shape"
        assert content(ask(other, "other")) == WHOLE
        assert len([s for s in submits(node) if says(s, "poison")]) == 3
        node.change(quarantined=())
        for front in (one, other):
            front.wait(lambda front=front: not front.front.fleet.quarantined())
        assert ask(other, "poison").status_code == 500
        assert len([s for s in submits(node) if says(s, "poison")]) == 6


def test_what_one_key_is_refused_is_no_others(node: FakeNode) -> None:
    """Each of them finds out by itself: nobody can have somebody else's requests refused."""
    node.worker(handing_over("shape", suspect=True, stays=True))
    keys = [Key("alice", digest_of("a")), Key("bob", digest_of("b"))]

    def ask_as(front: RunningFront, secret: str) -> int:
        front.client.headers["authorization"] = f"Bearer {secret}"
        return ask(front, "poison").status_code

    with RunningFront(node.control, keys=keys, metrics="open") as front:
        for secret, runs in (("a", 3), ("a", 3), ("b", 6), ("b", 6), ("a", 6)):
            assert ask_as(front, secret) == 500
            assert len(submits(node)) == runs
            front.wait(lambda: front.front.fleet.quarantined())


def test_it_is_refused_in_a_stream_by_an_error_event_and_no_done(node: FakeNode) -> None:
    node.worker(handing_over("shape", suspect=True, stays=True))
    with RunningFront(node.control) as front:
        text = ask(front, "poison", stream=True).text
        last = text.rstrip().rpartition("\n\n")[2]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shape"
        assert "[DONE]" not in text


def test_a_ttl_of_nothing_refuses_nothing(node: FakeNode) -> None:
    worker = node.worker(handing_over("shape", suspect=True, stays=True))
    with RunningFront(node.control, quarantine_ttl_s=0.0) as front:
        for _ in range(2):
            assert ask(front, "poison").status_code == 500
    assert len(worker.submits) == 6


def test_those_that_were_not_in_the_pass_are_never_flagged(node: FakeNode) -> None:
    node.worker(handing_over("shape", stays=True))
    with RunningFront(node.control, max_attempts=2) as front:
        response = ask(front, "poison")
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "workers_lost"
        assert response.json()["error"]["retryable"] is True
    assert [submit.suspect for submit in submits(node)] == [False] * 2 * BYSTANDER


def test_B01_a_worker_that_stays_may_break_any_number_of_batches_beside_a_request_that_goes_on(
    node: FakeNode,
) -> None:
    """Two requests are enough to break six batches; each time this one has a token more."""

    def one_word(submit: Submit) -> Iterator[ScriptStep]:
        yield accept(submit)
        begun = len(submit.resume[0]) if submit.resume else 0
        if begun == len(WORDS):
            yield from list(answer_words()(submit))[1:]
            return
        yield step(submit, begun, WORDS[begun])
        marked = begun < SUSPECT
        yield Handover(submit.rid, submit.attempt, "shape", marked=marked, stays=True)

    worker = node.worker(one_word)
    with RunningFront(node.control, max_attempts=2) as front:
        assert content(ask(front)) == WHOLE
    assert len(worker.submits) > len(WORDS)


def dying(node: FakeNode, kind: str, **roles: Any) -> Any:
    """Dies of a request with "poison" in it; the reaper says so a moment later."""

    def script(submit: Submit) -> Iterator[ScriptStep]:
        if not says(submit, "poison"):
            yield from answer_words()(submit)
            return
        yield accept(submit)
        slot = slot_of(node, submit)
        threading.Timer(0.1, node.lose, (slot, kind), roles or {"suspects": [submit.rid]}).start()
        yield DIE

    return script


def test_the_reapers_verdict_is_waited_for(node: FakeNode) -> None:
    """A worker that is just gone cannot say what it died of."""
    for _ in range(4):
        node.worker(dying(node, "crashed"))
    with RunningFront(node.control, verdict_wait_s=20.0) as front:
        front.wait_workers(4)
        response = ask(front, "poison")
        assert response.json()["error"]["code"] == "crashed"
        assert [submit.suspect for submit in submits(node)] == [False, False, True]
        assert ask(front, "poison").json()["error"]["code"] == "crashed"
        assert content(ask(front)) == WHOLE, "the fourth worker lives"
        assert len([s for s in submits(node) if says(s, "poison")]) == 3


def test_nobodys_fault_is_nobodys_fault(node: FakeNode) -> None:
    """An outside SIGKILL: the reaper names no suspects."""
    for _ in range(3):
        node.worker(dying(node, "killed", suspects=()))
    node.worker(answer_words())
    with RunningFront(node.control, max_attempts=10, verdict_wait_s=20.0) as front:
        front.wait_workers(4)
        assert content(ask(front, "poison")) == WHOLE
    assert not any(submit.suspect for submit in submits(node))


def test_without_a_reaper_nobody_waits_for_its_verdict(node: FakeNode) -> None:
    gate = threading.Event()

    def script(submit: Submit) -> Iterator[ScriptStep]:
        if submit.attempt > 1:
            return answer_words()(submit)
        return iter((accept(submit), step(submit, 0, WORDS[0]), gate, DIE))

    for _ in range(2):
        node.worker(script)
    with RunningFront(node.control, roster_silence_s=2.5, verdict_wait_s=60.0) as front:
        front.wait_workers(2)
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(ask(front)))
        thread.start()
        front.wait(lambda: submits(node))
        node.silent = True
        front.wait(lambda: front.client.get("/readyz").status_code == 503)
        gate.set()
        front.wait(lambda: front.metric("mayfly_continuations_total") == 1)
        node.silent = False  # or its workers would get no new work
        thread.join()
    assert content(answers[0]) == WHOLE


def test_quarantine_waits_while_the_machine_itself_fails(node: FakeNode) -> None:
    node.worker(handing_over("shape", suspect=True, stays=True))
    for number in range(3):
        node.worker(answer_words(), slot=f"other-{number}")
    with RunningFront(node.control, max_attempts=5) as front:
        front.wait_workers(4)
        for number in range(3):
            node.lose(f"other-{number}", "crashed", suspects=[f"r{number}"])
        front.wait(lambda: front.front.fleet.machine_is_failing())
        response = ask(front, "poison")
        assert response.json()["error"]["code"] == "workers_lost"
        assert response.json()["error"]["retryable"] is True
        assert not front.front.fleet.quarantined()


def test_B03_the_machine_is_not_to_blame_where_others_got_tokens(node: FakeNode) -> None:
    """Three workers die of requests that have nothing in common, each after it served another."""
    node.worker(handing_over("shape", suspect=True, stays=True))
    for number in range(3):
        node.worker(answer_words(), slot=f"other-{number}")
    with RunningFront(node.control) as front:
        front.wait_workers(4)
        served = {worker for worker in front.front.fleet._links if worker.slot.startswith("other-")}
        for worker in served:
            front.front.fleet.note_served(worker, "innocent")
        for number in range(3):
            node.lose(f"other-{number}", "crashed", suspects=[f"r{number}"])
        front.wait(lambda: sum(len(r.losses) for r, _ in front.front.fleet.nodes()) == 3)
        assert not front.front.fleet.machine_is_failing()
        assert ask(front, "poison").json()["error"]["code"] == "shape"
        assert front.metric("mayfly_quarantined_total") == 1


def test_B02_one_on_trial_serves_what_no_other_worker_can(node: FakeNode) -> None:
    gate = threading.Event()

    def held(submit: Submit) -> Iterator[ScriptStep]:
        yield accept(submit)
        yield gate
        yield from list(answer_words()(submit))[1:]

    worker = node.worker(held, trial=True)
    with RunningFront(node.control, keep_alive_s=0.1) as front, ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(ask, front, f"number {n}") for n in range(3)]
        front.wait(lambda: len(worker.submits) == 3)
        gate.set()
        assert [content(answer.result()) for answer in answers] == [WHOLE] * 3


def test_B02_one_on_trial_is_left_alone_while_there_is_another(node: FakeNode) -> None:
    trial = node.worker(answer_words(), trial=True)
    other = node.worker(answer_words())
    with RunningFront(node.control) as front:
        front.wait_workers(2)
        for number in range(4):
            assert content(ask(front, f"number {number}")) == WHOLE
    assert (len(trial.submits), len(other.submits)) == (0, 4)
