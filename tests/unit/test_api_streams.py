"""Streamed answers as OpenAI's own client reads them. docs/reported-faults.md lists ids such as R35
in test names."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from mayfly_protocol.serving import (
    Delta,
    Finish,
    Rejected,
    Submit,
    TokenLogprob,
    Tokens,
    ToolCallDelta,
    TopLogprob,
    Usage,
)
from support.doubles.fake_node import (
    WORDS,
    AnswerScript,
    FakeNode,
    FakeWorker,
    ScriptStep,
    accept,
    answer_then,
    answer_words,
    die,
)
from support.front_client import USER, WHOLE
from support.running_front import RunningFront

HELLO: Any = [USER]


@pytest.fixture
def worker(node: FakeNode) -> Iterator[FakeWorker]:
    worker = node.workers[0]
    yield worker
    worker.script = answer_words()


@pytest.fixture(scope="module")
def client(front: RunningFront) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def deltas(*parts: dict[str, Any], usage: Usage | None = None) -> AnswerScript:
    """Returns one choice's deltas, a token each."""

    def script(submit: Submit) -> Iterator[ScriptStep]:
        yield accept(submit)
        for index, part in enumerate(parts):
            fields = {"choice": 0, "index": index, "ids": (index,)} | part
            yield Tokens((Delta(submit.rid, submit.attempt, **fields),))
        yield Finish(submit.rid, submit.attempt, "done", usage or Usage())

    return script


def test_chat_is_the_same_streamed_or_not(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="tiny", messages=HELLO)
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert whole.choices[0].message.content == text == WHOLE
    assert chunks[-1].usage == whole.usage
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (7, len(WORDS))
    assert whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.cached_tokens == 2
    assert whole.system_fingerprint == chunks[0].system_fingerprint == "fp_" + "d" * 12


def test_completions_are_the_same_streamed_or_not(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="tiny", prompt="hi")
    chunks = list(
        client.completions.create(
            model="tiny", prompt="hi", stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(c.choices[0].text for c in chunks if c.choices)
    assert whole.choices[0].text == text == WHOLE
    assert chunks[-1].usage == whole.usage


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_R35_R36_usage_only_when_asked_for(front: RunningFront, path: str) -> None:
    def events(**body: Any) -> list[dict[str, Any]]:
        needed = {"messages": HELLO} if "chat" in path else {"prompt": "hi"}
        text = front.client.post(path, json=needed | {"stream": True} | body).text
        lines = text.strip().split("\n\n")
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    for body in ({}, {"stream_options": {"include_usage": False}}, {"stream_options": {}}):
        for event in events(**body):
            assert event["choices"]
            assert event.get("usage") is None
    *others, last = events(stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 7 + len(WORDS)
    assert all(event["choices"] and event["usage"] is None for event in others)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_usage_so_far_in_every_chunk(front: RunningFront, worker: FakeWorker, path: str) -> None:
    """Tokens without text, here those of half a character and of the end, count too."""
    worker.script = deltas(
        {"text": "a"}, {}, {"text": "é", "ids": (2, 3)}, {"index": 4, "ids": (), "finish": "stop"}
    )
    needed = {"messages": HELLO} if "chat" in path else {"prompt": "hi"}
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = needed | {"stream": True, "stream_options": options}
    lines = front.client.post(path, json=asked).text.strip().split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    told = [chunk["usage"] for chunk in chunks if chunk["choices"]]
    assert {usage["prompt_tokens"] for usage in told} == {7}
    assert sorted({usage["completion_tokens"] for usage in told}) == [1, 4]
    assert all(u["total_tokens"] == 7 + u["completion_tokens"] for u in told)
    assert all("prompt_tokens_details" not in usage for usage in told)
    assert chunks[-1]["choices"] == []


@pytest.mark.parametrize("n", [1, 2])
def test_R26_R45_R46_the_chunks_of_a_stream(client: openai.OpenAI, n: int) -> None:
    chunks = list(client.chat.completions.create(model="tiny", messages=HELLO, stream=True, n=n))
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    assert chunks[0].object == "chat.completion.chunk"
    for index in range(n):
        own = [c.choices[0] for c in chunks if c.choices[0].index == index]
        assert [c.delta.role for c in own] == ["assistant"] + [None] * (len(own) - 1)
        assert [c.finish_reason for c in own] == [None] * (len(own) - 1) + ["stop"]
        assert "".join(c.delta.content or "" for c in own) == WHOLE
    assert {c.choices[0].index for c in chunks} == set(range(n))


def test_R46_streams_have_their_own_ids(client: openai.OpenAI) -> None:
    def identity(stream: Any) -> tuple[str, str]:
        (one,) = {(chunk.id, chunk.object) for chunk in stream}
        return one

    make = client.completions.create
    first, second = (identity(make(model="tiny", prompt="hi", stream=True)) for _ in range(2))
    assert first[0] != second[0]
    assert first[1] == second[1] == "text_completion"


def test_R26_length_everywhere(client: openai.OpenAI, worker: FakeWorker) -> None:
    worker.script = answer_words("a", "b", end="length")
    chat = client.chat.completions.create(model="tiny", messages=HELLO)
    text = client.completions.create(model="tiny", prompt="hi")
    stream = list(client.completions.create(model="tiny", prompt="hi", stream=True))
    assert chat.choices[0].finish_reason == text.choices[0].finish_reason == "length"
    assert [c.choices[0].finish_reason for c in stream] == [None, "length"]


CALLS = (
    {"tool_calls": (ToolCallDelta(0, "", "call_1", "add"),)},
    {"tool_calls": (ToolCallDelta(0, '{"x":'),)},
    {"tool_calls": (ToolCallDelta(0, "7}"),)},
    {"tool_calls": (ToolCallDelta(1, '{"y":"é"}', "call_2", "sub"),)},
    {"finish": "tool_calls"},
)


def test_R13_R14_parallel_tool_calls(client: openai.OpenAI, worker: FakeWorker) -> None:
    worker.script = deltas(*CALLS)
    whole = client.chat.completions.create(model="tiny", messages=HELLO).choices[0]
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
    calls = [
        (call.id, call.type, call.function.name, call.function.arguments)
        for call in whole.message.tool_calls or []
        if call.type == "function"
    ]
    assert calls == [
        ("call_1", "function", "add", '{"x":7}'),
        ("call_2", "function", "sub", '{"y":"é"}'),
    ]
    chunks = client.chat.completions.create(model="tiny", messages=HELLO, stream=True)
    pieces = [piece for c in chunks for piece in c.choices[0].delta.tool_calls or []]
    assert [(p.index, p.id, p.type) for p in pieces] == [
        (0, "call_1", "function"),
        (0, None, None),
        (0, None, None),
        (1, "call_2", "function"),
    ]
    streamed = ["", ""]
    for piece in pieces:
        assert piece.function is not None
        streamed[piece.index] += piece.function.arguments or ""
    assert streamed == ['{"x":7}', '{"y":"é"}']


def test_R14_text_beside_and_without_calls(client: openai.OpenAI, worker: FakeWorker) -> None:
    worker.script = deltas({"text": "Let me see."}, *CALLS)
    beside = client.chat.completions.create(model="tiny", messages=HELLO).choices[0]
    assert beside.message.content == "Let me see."
    assert len(beside.message.tool_calls or []) == 2
    worker.script = answer_words("plain")
    without = client.chat.completions.create(model="tiny", messages=HELLO).choices[0]
    assert (without.finish_reason, without.message.tool_calls) == ("stop", None)


def test_reasoning(front: RunningFront, worker: FakeWorker) -> None:
    worker.script = deltas(
        *({"reasoning": "hm"}, {"reasoning": ", yes"}, {"text": "42", "finish": "stop"}),
        usage=Usage(7, 3, 0, 2),
    )
    body = {"messages": HELLO}
    answer = front.client.post("/v1/chat/completions", json=body).json()
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm, yes", "42")
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
    text = front.client.post("/v1/chat/completions", json=body | {"stream": True}).text
    assert '"delta":{"reasoning_content":"hm"}' in text


EMOJI = "😀".encode()
LOGPROBS = (
    {
        "text": "Hi",
        "logprobs": (TokenLogprob(1, "Hi", b"Hi", -0.25, (TopLogprob(1, "Hi", b"Hi", -0.25),)),),
    },
    {"logprobs": (TokenLogprob(2, "\ufffd", EMOJI[:2], -1.5, (TopLogprob(9, "a", b"a", -0.1),)),)},
    {
        "text": "😀!",
        "logprobs": (
            TokenLogprob(3, "\ufffd", EMOJI[2:], float("-inf")),
            TokenLogprob(4, "!", b"!", -2.0),
        ),
        "ids": (3, 4),
        "finish": "stop",
    },
)


def test_logprobs_of_chat(client: openai.OpenAI, worker: FakeWorker) -> None:
    worker.script = deltas(*LOGPROBS)

    def ask(stream: bool) -> Any:
        return client.chat.completions.create(
            model="tiny", messages=HELLO, logprobs=True, top_logprobs=1, stream=stream
        )

    whole = ask(False).choices[0].logprobs.content
    assert [token.logprob for token in whole] == [-0.25, -1.5, -9999.0, -2.0]
    assert whole[1].bytes == list(EMOJI[:2])
    assert (whole[1].top_logprobs[0].token, whole[1].top_logprobs[0].logprob) == ("a", -0.1)
    chunks = list(ask(True))
    streamed = [t for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.content]
    assert streamed == whole
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "Hi😀!"


def token(text: str) -> tuple[TokenLogprob, ...]:
    return (TokenLogprob(1, text, text.encode(), -1.0),)


THOUGHT_AND_CALL = (
    {"logprobs": token("<think>")},
    {"reasoning": "Hm", "logprobs": token("Hm")},
    {"reasoning": ".", "logprobs": token(".")},
    {"logprobs": token("</think>")},
    {"logprobs": token("\n\n")},
    {"text": "I", "logprobs": token("I")},
    {"logprobs": token(" s")},
    {"text": " see", "logprobs": token("ee")},
    {"logprobs": token("<tool>")},
    {"tool_calls": (ToolCallDelta(0, "{}", "c1", "sum"),), "logprobs": token("{}")},
    {"logprobs": token("<end>"), "finish": "tool_calls"},
)


def test_logprobs_of_chat_are_those_of_its_content(
    client: openai.OpenAI, worker: FakeWorker
) -> None:
    """Not those of the thought, the call and the end, as in OpenAI's API and in /v1/responses."""
    worker.script = deltas(*THOUGHT_AND_CALL)
    asked: Any = {"model": "tiny", "messages": HELLO, "logprobs": True}
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.message.content == "I see"
    assert [token.token for token in whole.logprobs.content] == ["I", " s", "ee"]
    chunks = list(client.chat.completions.create(**asked, stream=True))
    found = [t for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.content]
    assert found == whole.logprobs.content


def test_R52_logprobs_of_completions(client: openai.OpenAI, worker: FakeWorker) -> None:
    worker.script = deltas(*LOGPROBS)

    def ask(stream: bool) -> Any:
        return client.completions.create(model="tiny", prompt=["P", "Q"], logprobs=1, stream=stream)

    for choice in ask(False).choices:
        lists = choice.logprobs
        assert lists.tokens == ["Hi", r"bytes:\xf0\x9f", r"bytes:\x98\x80", "!"]
        assert lists.token_logprobs == [-0.25, -1.5, -9999.0, -2.0]
        assert lists.text_offset == [0, 2, 2, 3]
        assert lists.top_logprobs[1] == {"a": -0.1, r"bytes:\xf0\x9f": -1.5}
    offsets: dict[int, list[int]] = {0: [], 1: []}
    for chunk in ask(True):
        if chunk.choices[0].logprobs:
            offsets[chunk.choices[0].index] += chunk.choices[0].logprobs.text_offset
    assert offsets == {0: [0, 2, 2, 3], 1: [0, 2, 2, 3]}


def test_no_logprobs_where_none_were_asked_for(client: openai.OpenAI, worker: FakeWorker) -> None:
    worker.script = deltas(*LOGPROBS)
    chat = client.chat.completions.create(model="tiny", messages=HELLO)
    assert chat.choices[0].logprobs is None
    text = client.completions.create(model="tiny", prompt="hi")
    assert text.choices[0].logprobs is None


def test_an_echo_comes_first(client: openai.OpenAI, worker: FakeWorker) -> None:
    worker.script = deltas({"ids": (), "text": "Once", "finish": "length"})
    answer = client.completions.create(model="tiny", prompt="Once", echo=True, max_tokens=0)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == ("Once", "length")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


def test_R69_the_client_sees_an_error_in_mid_stream(
    client: openai.OpenAI, worker: FakeWorker
) -> None:
    def refuse(submit: Submit) -> Iterator[ScriptStep]:
        yield Rejected(submit.rid, submit.attempt, "invalid", "no longer", code="gone")

    worker.script = answer_then(2, refuse)
    stream = client.chat.completions.create(model="tiny", messages=HELLO, stream=True)
    seen = ""
    with pytest.raises(openai.APIError, match="no longer"):
        for chunk in stream:
            seen += chunk.choices[0].delta.content or ""
    assert seen == "".join(WORDS[:2])


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="tiny", messages=HELLO, temperature=9)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=HELLO)
    assert missing.value.code == "model_not_found"
    assert client.models.retrieve("tiny").id == "tiny"


def test_many_streams_at_once(client: openai.OpenAI, worker: FakeWorker) -> None:
    worker.script = answer_words(*[f" {i}" for i in range(30)], pause_s=0.005)
    texts: list[str] = []

    def read() -> None:
        stream = client.chat.completions.create(model="tiny", messages=HELLO, stream=True)
        texts.append("".join(chunk.choices[0].delta.content or "" for chunk in stream))

    threads = [threading.Thread(target=read) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == ["".join(f" {i}" for i in range(30))] * 16


def test_the_client_notices_no_death(client: openai.OpenAI) -> None:
    with FakeNode() as node:
        scripts = [answer_then(3, die), answer_words()]
        for _ in scripts:
            node.worker(lambda submit: scripts[submit.attempt - 1](submit))
        with RunningFront(node.control) as front:
            front.wait_workers(2)
            with client.with_options(base_url=f"{front.url}/v1") as mine:
                stream = mine.chat.completions.create(model="tiny", messages=HELLO, stream=True)
                assert "".join(c.choices[0].delta.content or "" for c in stream) == WHOLE
