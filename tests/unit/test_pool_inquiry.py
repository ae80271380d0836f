"""Questions to workers (tokenize, detokenize): the worker that is asked, and missing answers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.doubles.fake_node import PROMPT_TOKENS, FakeNode
from support.running_front import RunningFront

ASKED = {"prompt": "hi"}


@pytest.fixture
def node() -> Iterator[FakeNode]:
    with FakeNode() as node:
        yield node


def test_any_worker_can_answer(node: FakeNode) -> None:
    node.worker()
    with RunningFront(node.control) as front:
        answer = front.client.post("/tokenize", json=ASKED).json()
        assert answer["count"] == len(answer["tokens"]) == PROMPT_TOKENS
        assert answer["max_model_len"] == 4096
        assert front.client.post("/detokenize", json={"tokens": [1, 2]}).json() == {"prompt": "1 2"}
        assert front.metric("mayfly_late_messages_total") == 0


def test_no_token_is_looked_at(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """FastAPI's serialisation takes a microsecond a token, of which there may be millions, and
    streams stand still meanwhile."""

    def looking(**_: object) -> None:
        raise AssertionError("FastAPI looks at an answer")

    node.worker()
    with RunningFront(node.control) as front:
        monkeypatch.setattr("fastapi.routing.serialize_response", looking)
        assert front.client.post("/tokenize", json=ASKED).status_code == 200


def test_a_worker_that_does_not_answer_is_left_for_another(node: FakeNode) -> None:
    silent = [node.worker() for _ in range(2)]
    with RunningFront(node.control, accept_wait_s=0.3) as front:
        front.wait_workers(2)
        for worker in silent:
            worker.deaf = True
        for _ in range(3):  # one may be paused as long as that
            node.worker()
        front.wait_workers(5)
        for _ in range(3):
            assert front.client.post("/tokenize", json=ASKED).status_code == 200


def test_nobody_is_there_to_answer(node: FakeNode) -> None:
    worker = node.worker()
    with RunningFront(node.control, accept_wait_s=0.1, queue_wait_s=0.3) as front:
        worker.deaf = True
        response = front.client.post("/tokenize", json=ASKED)
        assert response.status_code == 503
        assert response.json()["error"]["retryable"] is True
        assert "did not answer in time" in response.json()["error"]["message"]
        node.show(node.view("slot-1").__class__("slot-1", "tiny", "failed", 1))
        front.wait(lambda: front.client.get("/readyz").status_code == 503)
        response = front.client.post("/tokenize", json=ASKED)
        assert response.json()["error"]["code"] == "model_failed"


def test_a_question_waits_for_a_worker_that_is_loaded(node: FakeNode) -> None:
    node.worker(state="loading")
    with RunningFront(node.control, ready=False, queue_wait_s=0.3) as front:
        front.wait(lambda: "loaded" in front.client.get("/readyz").text)
        assert front.client.post("/tokenize", json=ASKED).status_code == 503
    with RunningFront(node.control, ready=False) as front:
        front.wait(lambda: "loaded" in front.client.get("/readyz").text)
        node.worker(slot="slot-1")
        assert front.client.post("/tokenize", json=ASKED).status_code == 200
