"""Chunks of streamed answers. docs/reported-faults.md lists the ids in test names."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Callable
from functools import partial

import pytest

from conformance.conftest import SLOW_STEP_S
from mayfly_protocol.serving import Failed, Finish, Rejected, Submit
from support.api_client import (
    CHAT,
    PATHS,
    TEXT,
    Json,
    Stream,
    answer,
    body,
    choice,
    read,
    stream_from,
    together,
    user,
    whole_stream,
)
from support.doubles.fake_node import (
    DIE,
    WORDS,
    AnswerScript,
    FakeNode,
    ScriptStep,
    accept,
    answer_then,
    answer_words,
)
from support.models.tokenizer import PAD
from support.running_front import RunningFront
from support.scripted_answers import CHARACTERS, byte_ids
from support.server import Server

both_routes = pytest.mark.parametrize("path", PATHS)


def scripted(path: str, trigger: str) -> Json:
    """A request that the scripted model answers with a play, on either route."""
    return {"messages": [user(trigger)]} if path == CHAT else {"prompt": f"{trigger}{PAD}"}


@both_routes
def test_R32_characters_of_several_tokens(script: Server, path: str) -> None:
    asked: Json = {**scripted(path, "[characters]"), "max_tokens": 200}
    assert len(byte_ids(CHARACTERS)) > 2 * len(CHARACTERS)
    found = [whole_stream(script, path, **asked)]
    found += together(*[partial(whole_stream, script, path, **asked)] * 4)
    for streamed in found:
        assert streamed.text() == CHARACTERS
        assert all("\ufffd" not in piece for piece in streamed.pieces())
        assert streamed.finish() == "stop"
    assert choice(script, path, **asked)["text"] == CHARACTERS


@both_routes
def test_R32_half_a_character_is_what_decoding_makes_of_it(script: Server, path: str) -> None:
    """The token budget may end in the middle of a character, too."""
    asked: Json = {**scripted(path, "[half]"), "max_tokens": 20}
    assert whole_stream(script, path, **asked).text() == choice(script, path, **asked)["text"]
    assert choice(script, path, **asked)["text"] == "so \ufffd"
    asked = {**scripted(path, "[characters]"), "max_tokens": 5}
    assert whole_stream(script, path, **asked).text() == choice(script, path, **asked)["text"]
    assert choice(script, path, **asked)["text"] == "ok \ufffd"


def test_R32_random_bytes(tiny: Server) -> None:
    """A byte-level tokenizer at a temperature at which it writes nonsense: whatever the bytes of
    the tokens are, the text is their decoding."""
    asked: Json = {"temperature": 2, "seed": 3, "n": 4, "max_tokens": 60}
    whole = answer(tiny, CHAT, **asked, logprobs=True)
    streamed = whole_stream(tiny, CHAT, **asked)
    for index, one in enumerate(whole["choices"]):
        raw = b"".join(bytes(token["bytes"]) for token in one["logprobs"]["content"])
        assert one["message"]["content"] == raw.decode("utf-8", "replace")
        assert streamed.text(index) == one["message"]["content"]


@both_routes
def test_R34_text_is_sent_as_soon_as_it_is_certain(slow: Server, path: str) -> None:
    def distance_s() -> float:
        streamed = whole_stream(slow, path, **scripted(path, "[emoji]"), max_tokens=20)
        assert streamed.text() == "hi😀 ok"
        arrived: dict[str, float] = {}
        for at, part in zip(streamed.times, streamed.of(0), strict=True):
            for character in part["text"] if path == TEXT else part["delta"].get("content", ""):
                arrived[character] = at
        return arrived["😀"] - arrived["i"]

    # It is made of four tokens. A pause of the machine hides that; text that is kept back never
    # shows it.
    assert any(distance_s() > 2 * SLOW_STEP_S for _ in range(5))


@both_routes
def test_R35_R36_usage_only_where_it_was_asked_for(tiny: Server, path: str) -> None:
    whole = answer(tiny, path, max_tokens=4, n=2)["usage"]
    asked = whole_stream(tiny, path, max_tokens=4, n=2, stream_options={"include_usage": True})
    *others, last = asked.chunks
    assert last["choices"] == []
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][key] == whole[key]
    assert all(chunk["choices"] and chunk["usage"] is None for chunk in others)
    for options in ({}, {"stream_options": None}, {"stream_options": {"include_usage": False}}):
        unasked = whole_stream(tiny, path, max_tokens=4, **options)
        assert all(chunk["choices"] and not chunk.get("usage") for chunk in unasked.chunks)


@both_routes
@pytest.mark.parametrize("n", [1, 3])
def test_usage_so_far_ends_at_what_was_used(tiny: Server, path: str, n: int) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = whole_stream(tiny, path, max_tokens=6, n=n, stream_options=options)
    *others, last = stream.chunks
    told = [chunk["usage"]["completion_tokens"] for chunk in others]
    assert told == sorted(told)
    assert told[-1] == last["usage"]["completion_tokens"] == 6 * n
    assert {chunk["usage"]["prompt_tokens"] for chunk in stream.chunks} == {
        last["usage"]["prompt_tokens"]
    }


@both_routes
@pytest.mark.parametrize("n", [1, 2, 5])
def test_R45_each_choice_under_its_own_index(tiny: Server, path: str, n: int) -> None:
    asked: Json = {"n": n, "temperature": 1.5, "seed": 5, "max_tokens": 12}
    whole = answer(tiny, path, **asked)
    streamed = whole_stream(tiny, path, **asked, stream_options={"include_usage": True})
    assert {c["index"] for chunk in streamed.chunks for c in chunk["choices"]} == set(range(n))
    texts = []
    for index in range(n):
        assert streamed.finish(index) == "length"
        if path == CHAT:
            roles = [part["delta"].get("role") for part in streamed.of(index)]
            assert roles == ["assistant"] + [None] * (len(roles) - 1)
        texts.append(streamed.text(index))
    assert len(set(texts)) == n
    assert texts == [
        one["message"]["content"] if path == CHAT else one["text"] for one in whole["choices"]
    ]
    assert streamed.usage is not None
    assert streamed.usage["completion_tokens"] == 12 * n


@both_routes
def test_R46_one_id_and_one_time_a_stream(slow: Server, path: str) -> None:
    kind = "chat.completion.chunk" if path == CHAT else "text_completion"
    asked: Json = {**scripted(path, "[on and on]"), "max_tokens": 80}
    streams: list[Stream] = together(*[partial(whole_stream, slow, path, **asked)] * 2)
    for streamed in streams:
        assert streamed.times[-1] - streamed.times[0] > 1.0, "it has to see two seconds"
        assert {chunk["object"] for chunk in streamed.chunks} == {kind}
        assert len({(chunk["id"], chunk["created"]) for chunk in streamed.chunks}) == 1
        assert {chunk["model"] for chunk in streamed.chunks} == {slow.model}
    assert len({streamed.chunks[0]["id"] for streamed in streams}) == 2


@both_routes
def test_R47_signs_of_life_before_the_first_token(slow: Server, path: str) -> None:
    """A prompt that takes some seconds: comments meanwhile, and the first event is the stream's
    own beginning."""
    asked = scripted(path, f"{'a b c d ' * 250}[text]")
    streamed = whole_stream(slow, path, **asked, max_tokens=20)
    assert streamed.comments
    assert streamed.text() == "Just text."
    if path == CHAT:
        assert streamed.chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert len({chunk["id"] for chunk in streamed.chunks}) == 1


@both_routes
def test_R48_a_strict_client_can_go_on_with_its_connection(tiny: Server, path: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", tiny.port, timeout=30)
    try:
        for _ in range(2):
            asked = json.dumps(body(tiny, path, stream=True))
            connection.request("POST", path, asked, {"content-type": "application/json"})
            response = connection.getresponse()
            assert response.getheader("transfer-encoding") == "chunked"
            streamed = Stream(response.status)
            read(iter(response.read().decode().splitlines()), streamed)  # to the last chunk
            assert streamed.done and streamed.finish() == "length"
            sock = connection.sock
            assert sock is not None
        assert connection.sock is sock, "it was the same connection all the time"
    finally:
        connection.close()


@both_routes
def test_R48_the_body_ends_with_the_chunk_of_no_length(tiny: Server, path: str) -> None:
    asked = json.dumps(body(tiny, path, stream=True)).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(asked)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", tiny.port), timeout=30) as connection:
        connection.sendall(head.encode() + asked)
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            part = connection.recv(65536)
            assert part, "closed before its end"
            received += part
        assert b"data: [DONE]\n\n\r\n0\r\n\r\n" in received


# Workers that fail, before a front end as it is


def script_of(*acts: Callable[[Submit], ScriptStep]) -> AnswerScript:
    return lambda submit: iter([act(submit) for act in acts])


def fail(submit: Submit) -> ScriptStep:
    return Failed(submit.rid, submit.attempt, "metal_buffer_size", "out of something")


def end(submit: Submit) -> ScriptStep:
    """Ends the stream as if it were complete."""
    return Finish(submit.rid, submit.attempt, "done")


def refuse(submit: Submit) -> ScriptStep:
    code = "context_length_exceeded"
    return Rejected(submit.rid, submit.attempt, "invalid", "too long", "messages", code)


def close(submit: Submit) -> ScriptStep:
    return DIE


@pytest.mark.parametrize(
    ("worker", "status", "code"),
    [
        (script_of(fail), 500, "metal_buffer_size"),
        (script_of(accept, fail), None, "metal_buffer_size"),
        (answer_then(2, script_of(fail)), None, "metal_buffer_size"),
        (script_of(close), 503, "model_unavailable"),
        (script_of(accept, close), None, "model_unavailable"),
        (answer_then(2, script_of(close)), None, "model_unavailable"),
        (answer_then(2, script_of(end)), None, "model_unavailable"),
        (script_of(refuse), 400, "context_length_exceeded"),
    ],
    ids=[
        *("fails", "fails before the first token", "fails after two"),
        *("closes", "closes before the first token", "closes after two", "ends after two"),
        "context",
    ],
)
@both_routes
def test_R69_failures_never_look_like_an_end(
    path: str, worker: AnswerScript, status: int | None, code: str
) -> None:
    """``status`` where the headers are not out yet; otherwise the error is an event."""
    with FakeNode() as node:
        node.worker(worker)
        settings = {"queue_wait_s": 0.3, "failover_wait_s": 0.3, "keep_alive_s": 0.1}
        with RunningFront(node.control, **settings) as front:
            asked: Json = {"messages": [user("hi")]} if path == CHAT else {"prompt": "hi"}
            streamed = stream_from(front.client, path, asked)
            assert streamed.status == (status or 200)
            [error] = streamed.errors
            assert (error["code"], streamed.done) == (code, False)
            if status is None:
                assert streamed.events[-1] == {"error": error}
                assert all(part["finish_reason"] is None for part in streamed.of(0))
                assert streamed.text() in ("", "".join(WORDS[:2]))
            response = front.client.post(path, json=asked)
            assert response.status_code >= 400
            assert {"message", "type", "param", "code"} <= response.json()["error"].keys()


@both_routes
def test_R69_where_another_worker_goes_on_nothing_is_seen(path: str) -> None:
    with FakeNode() as node:
        node.worker(answer_then(2, script_of(close)))
        node.worker(answer_words())
        with RunningFront(node.control) as front:
            front.wait_workers(2)
            asked: Json = {"messages": [user("hi")]} if path == CHAT else {"prompt": "hi"}
            streamed = stream_from(front.client, path, asked)
            assert (streamed.text(), streamed.finish()) == ("".join(WORDS), "stop")
            assert streamed.done and not streamed.errors
