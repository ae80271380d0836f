"""Request bodies, headers, probes and errors. docs/reported-faults.md lists ids such as R65 in test
names."""

from __future__ import annotations

import http.client
import json
import re
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import httpx
import pytest

from mayfly_server.http.errors import UNDER_V1
from support.doubles.fake_node import FakeNode, accept, answer_words, step
from support.front_client import CHAT, HELLO, TEXT
from support.raw_http import status_of_raw
from support.running_front import RunningFront

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def front(node: FakeNode) -> Iterator[RunningFront]:
    with RunningFront(node.control, max_body_bytes=1 << 20) as front:
        yield front


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code", "retryable"}
    return error


def bodies(path: str, text: str) -> bytes:
    """A valid body with a JSON string's content as it is written."""
    if path == TEXT:
        return f'{{"prompt": "{text}"}}'.encode()
    return f'{{"messages": [{{"role": "user", "content": "{text}"}}]}}'.encode()


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"hi"', b"null", b"{} {}", b'{"n": 1,}', b"\xff", b'{"a": "\xff"}']
)
def test_R65_bodies_that_are_no_object(front: RunningFront, path: str, body: bytes) -> None:
    response = front.client.post(path, content=body, headers=JSON)
    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"


def test_R65_wrong_methods_and_addresses(front: RunningFront) -> None:
    for path in (CHAT, TEXT):
        response = front.client.get(path)
        assert (response.status_code, response.headers["allow"]) == (405, "POST")
        error_of(response)
    for path in (
        "/v1",
        "/v1/nonsense",
        "/page",
        "/page/",
        "/page/../app.py",
        "/v1/chat/completions/x",
        "/docs",
    ):
        response = front.client.get(path)
        assert response.status_code == 404
        error_of(response)


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("stream", ["true", "false"])
def test_R63_unpaired_surrogates(front: RunningFront, path: str, stream: str) -> None:
    for text in (r"a\ud83db", r"\ud83d", r"\ude00", r"\ude00\ud83d"):
        body = bodies(path, text)[:-1] + f', "stream": {stream}}}'.encode()
        response = front.client.post(path, content=body, headers=JSON)
        assert response.status_code == 400
        assert "Error" not in response.text.replace("error", "")
    fine = front.client.post(path, content=bodies(path, r"\ud83d\ude00"), headers=JSON)
    assert fine.status_code == 200


def test_R63_in_every_place(front: RunningFront) -> None:
    for extra in (r'"model": "\ud83d"', r'"stop": "\ud83d"', r'"user": "\ud83d"'):
        body = b'{"messages": [{"role": "user", "content": "a"}], ' + extra.encode() + b"}"
        assert front.client.post(CHAT, content=body, headers=JSON).status_code == 400


def test_R64_chunked_bodies(front: RunningFront) -> None:
    body = json.dumps(HELLO).encode()
    response = front.client.post(CHAT, content=iter((body[:9], body[9:])), headers=JSON)
    assert response.status_code == 200


def test_R64_expect_100_continue(front: RunningFront) -> None:
    body = json.dumps(HELLO).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nExpect: 100-continue\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", front.port), timeout=5) as connection:
        connection.sendall(head.encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 100")
        connection.sendall(body)
        assert connection.recv(100).startswith(b"HTTP/1.1 200")


def test_an_address_with_a_v1_too_many_or_too_few(front: RunningFront) -> None:
    served = front.client.get("/openapi.json").json()["paths"]
    for address in UNDER_V1:
        assert address in served
        for wrong in (address.removeprefix("/v1"), f"/v1{address}"):
            response = front.client.post(wrong, json=HELLO)
            assert response.status_code == 404
            assert f"did you mean {address}?" in error_of(response)["message"]
    assert "mean" not in error_of(front.client.post("/chat", json=HELLO))["message"]


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("/v1//chat/completions", CHAT),
        ("//v1/chat/completions", CHAT),
        ("/v1/v1/chat/completions", CHAT),
        ("/V1/Chat/Completions", CHAT),
        ("/openai/v1/chat/completions", CHAT),
        ("/v1/chat/completions/chat/completions", CHAT),
        ("/api/v0/completions", TEXT),
        ("/anthropic/v1/messages", "/v1/messages"),
        ("/v1//messages/count_tokens", "/v1/messages/count_tokens"),
        ("/api/v0/models", "/v1/models"),
        ("/v1//responses", "/v1/responses"),
        ("/api/chat", CHAT),
        ("/api/tags", "/v1/models"),
    ],
)
def test_slips_in_an_address_get_a_hint(front: RunningFront, wrong: str, meant: str) -> None:
    response = front.client.post(f"{front.url}{wrong}", json=HELLO)
    assert response.status_code == 404
    assert f"did you mean {meant}?" in error_of(response)["message"]


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/models/tiny", "/livez", "/mayfly/status", "/openapi.json", "/page"]
)
def test_HEAD_is_GET_without_the_body(front: RunningFront, path: str) -> None:
    whole, head = front.client.get(path), front.client.head(path)
    assert head.status_code == whole.status_code
    assert head.content == b""
    for name in ("content-type", "content-length"):
        if path != "/mayfly/status":  # whose times go on
            assert head.headers[name] == whole.headers[name]
    assert front.client.head(CHAT).status_code == 405
    assert front.client.get(path).content == whole.content or path == "/mayfly/status"


def test_HEAD_of_a_stream_without_an_end_ends(front: RunningFront) -> None:
    response = front.client.head("/mayfly/events")
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.content == b""
    assert front.client.get("/livez").status_code == 200


def test_R64_content_types(front: RunningFront) -> None:
    def status(headers: dict[str, str]) -> int:
        response = front.client.post(CHAT, content=json.dumps(HELLO), headers=headers)
        return response.status_code

    assert status({}) == 200
    assert status({"content-type": "application/json; charset=utf-8"}) == 200
    assert status({"content-type": "text/plain"}) == 415
    assert status({"content-type": "multipart/form-data; boundary=x"}) == 415


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_R132_deep_nesting(front: RunningFront, path: str) -> None:
    deep = b"[" * 10_000 + b"]" * 10_000
    objects = b'{"a":' * 1000 + b"1" + b"}" * 1000
    for name in (b"tools", b"nonsense", b"logit_bias", b"prompt", b"messages"):
        for value in (deep, objects):
            body = b'{"%s": %s}' % (name, value)
            response = front.client.post(path, content=body, headers=JSON)
            assert response.status_code == 400
            error_of(response)
    assert front.client.get("/readyz").status_code == 200


def test_R133_bodies_beyond_the_limit(front: RunningFront) -> None:
    big = json.dumps(HELLO | {"user": "x" * (1 << 20)}).encode()
    response = front.client.post(CHAT, content=big, headers=JSON)
    assert (response.status_code, error_of(response)["code"]) == (413, "request_too_large")
    chunks = (big[at : at + 65536] for at in range(0, len(big), 65536))
    response = front.client.post(CHAT, content=chunks, headers=JSON)
    assert response.status_code == 413
    with socket.create_connection(("127.0.0.1", front.port), timeout=5) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {10 << 30}\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


def test_R48_a_connection_is_reusable_after_a_stream(front: RunningFront) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=5)
    try:
        for _ in range(2):
            connection.request("POST", CHAT, json.dumps(HELLO | {"stream": True}), JSON)
            response = connection.getresponse()
            assert response.getheader("transfer-encoding") == "chunked"
            assert response.read().endswith(b"data: [DONE]\n\n")
    finally:
        connection.close()


def test_R48_the_terminating_chunk(front: RunningFront) -> None:
    body = json.dumps(HELLO | {"stream": True}).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", front.port), timeout=5) as connection:
        connection.sendall(head.encode() + body)
        received = b""
        while part := connection.recv(65536):
            received += part
    assert received.endswith(b"\r\n0\r\n\r\n")


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/livez", "/mayfly/status"])
def test_a_redirect_stays_with_its_scheme_and_host(front: RunningFront, path: str) -> None:
    """The server does not know how its clients reach it."""
    response = front.client.post(f"{path}/?x=1", headers={"host": "localhost:1"}, json={})
    assert (response.status_code, response.headers["location"]) == (307, f"{path}?x=1")
    assert (
        status_of_raw(front, f"GET //elsewhere.example{path}/ HTTP/1.1\r\nHost: localhost\r\n\r\n")
        == 404
    )


def test_request_ids(front: RunningFront) -> None:
    def answered(sent: dict[str, str], path: str = "/livez") -> str:
        return front.client.get(path, headers=sent).headers["x-request-id"]

    assert answered({"x-request-id": "my-id.1"}) == "my-id.1"
    assert answered({"x-request-id": "my-id.1"}, "/nonsense") == "my-id.1"
    assert answered({}) != answered({})
    for harmful in ("a b", "x" * 200, '<a href="">'):
        assert answered({"x-request-id": harmful}).startswith("req_")


def test_R68_R122_models_and_their_names(front: RunningFront) -> None:
    (model,) = front.client.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", 4096)
    assert front.client.get("/v1/models/tiny").json() == model
    names = ("context_length", "context_window", "max_context_length", "max_input_tokens")
    assert {model[name] for name in (*names, "loaded_context_length")} == {4096}
    assert model["meta"] == {"n_ctx": 4096}
    for name in ("someorg/some-7b", "tiny ", "TINY", "../tiny", "/etc/passwd", "org/tiny"):
        response = front.client.post(CHAT, json=HELLO | {"model": name})
        assert response.status_code == 404
        assert error_of(response)["code"] == "model_not_found"
    assert front.client.get("/v1/models/org/other").status_code == 404


def test_status(front: RunningFront) -> None:
    (node,) = front.client.get("/mayfly/status").json()["nodes"]
    (slot,) = node["slots"]
    assert (node["node"], node["pid"], node["silent"]) == ("node", 1, False)
    assert (slot["slot"], slot["model"], slot["state"]) == ("slot-1", "tiny", "ready")
    assert (slot["incarnation"], slot["pid"], slot["running"]) == (1, 1001, 0)
    assert slot["inferences"] == 0


def test_metrics(front: RunningFront) -> None:
    before = front.metric('mayfly_requests_total{model="tiny",outcome="200"}')
    front.client.post(CHAT, json=HELLO)
    assert front.metric('mayfly_requests_total{model="tiny",outcome="200"}') == before + 1
    assert front.metric("mayfly_num_requests_") == 0
    assert front.metric("mayfly_time_to_first_token_seconds_count") > 0


def test_the_openapi_document(front: RunningFront) -> None:
    document = front.client.get("/openapi.json").json()
    body = document["paths"][CHAT]["post"]["requestBody"]["content"]
    assert list(body) == ["application/json"]


def test_a_conversation_has_a_home() -> None:
    with FakeNode() as node:
        workers = [node.worker() for _ in range(4)]
        with RunningFront(node.control) as front:
            front.wait_workers(4)
            turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "1"}]
            for _ in range(4):
                assert front.client.post(CHAT, json={"messages": turns}).status_code == 200
                turns += [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
            assert sorted(len(worker.submits) for worker in workers) == [0, 0, 0, 4]


class TestProbes:
    def test_alive_but_not_ready(self) -> None:
        with FakeNode() as node, RunningFront(node.control, ready=False) as front:
            for path in ("/readyz", "/health"):
                response = front.client.get(path)
                assert response.status_code == 503
                assert int(response.headers["retry-after"]) >= 1
                assert response.json()["status"] == "unavailable"
            worker = node.worker(state="loading", load_done=1, load_total=4, age_s=1.0)
            front.wait(lambda: "25 %" in front.client.get("/readyz").text)
            node.show(replace(node.view("slot-1"), state="ready"))
            front.wait(lambda: front.client.get("/readyz").json() == {"status": "ok"})
            node.show(replace(node.view("slot-1"), state="failed", detail="/Users/me/model"))
            front.wait(lambda: front.client.get("/readyz").status_code == 503)
            assert front.client.get("/readyz").json()["reason"] == "its workers cannot start"
            assert front.client.get("/livez").json() == {"status": "ok"}
            assert worker.submits == []

    def test_workers_that_stand_still_are_not_ok(self) -> None:
        with FakeNode() as node:
            for _ in range(2):
                node.worker()
            with RunningFront(node.control) as front:
                front.wait_workers(2)

                def said() -> dict[str, str]:
                    response = front.client.get("/health")
                    assert response.status_code == 200, "a request would be taken"
                    return cast(dict[str, str], response.json())

                assert said() == {"status": "ok"}
                for slot in ("slot-1", "slot-2"):
                    node.show(replace(node.view(slot), running=1))
                front.wait(lambda: said()["status"] == "stalled")
                assert re.search(r"have made no progress: tiny for \d+ s", said()["reason"])
                moved = node.view("slot-2")
                node.show(replace(moved, progress=moved.progress + 1))
                front.wait(lambda: said() == {"status": "ok"})

    def test_the_reaper_is_asked_once_the_front_end_listens(self) -> None:
        with FakeNode() as node, RunningFront(node.control, ready=False):
            assert node.asked.wait(5)

    def test_a_silent_node_gets_no_new_work(self) -> None:
        with FakeNode() as node:
            node.worker()
            with RunningFront(node.control, roster_silence_s=1.0) as front:
                node.silent = True
                front.wait(lambda: front.client.get("/readyz").status_code == 503)
                response = front.client.post(CHAT, json=HELLO)
                assert response.status_code == 503
                node.silent = False
                front.wait(lambda: front.client.get("/readyz").status_code == 200)


def test_R143_an_error_of_our_own_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("/Users/me/secret")

    with FakeNode() as node:
        node.worker(answer_words("a"))
        with RunningFront(node.control) as front:
            monkeypatch.setattr("mayfly_server.api.openai.chat_answer._message", broken)
            response = front.client.post(CHAT, json=HELLO, headers={"x-request-id": "mine"})
            assert (response.status_code, error_of(response)["code"]) == (500, "internal_error")
            assert "secret" not in response.text
            assert response.headers["x-request-id"] == "mine"  # as the log calls it
            monkeypatch.setattr("mayfly_server.api.openai.chat_answer._chat_delta", broken)
            response = front.client.post(CHAT, json=HELLO | {"stream": True})
            assert response.status_code == 200
            last = response.text.strip().splitlines()[-1].removeprefix("data: ")
            assert json.loads(last)["error"]["code"] == "internal_error"
            assert "secret" not in response.text


def test_two_pools_under_their_own_names() -> None:
    def named(word: str) -> Any:
        def script(submit: Any) -> Any:
            yield accept(submit)
            yield step(submit, 0, word, finish="stop")
            yield from list(answer_words(word)(submit))[-1:]

        return script

    with FakeNode() as node:
        node.worker(named("A"))
        node.worker(named("B"), model="org/other")
        with RunningFront(node.control) as front:
            front.wait_workers(2)
            for name, word in {"tiny": "A", "org/other": "B", "other": "B"}.items():
                answer = front.client.post(CHAT, json=HELLO | {"model": name}).json()
                assert answer["choices"][0]["message"]["content"] == word
            assert answer["model"] == "org/other"
            response = front.client.post(CHAT, json=HELLO)
            assert (response.status_code, error_of(response)["param"]) == (400, "model")
