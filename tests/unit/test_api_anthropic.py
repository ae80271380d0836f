"""Anthropic's messages API: requests as they reach the worker, events, and errors in Anthropic's
form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic.types
import pytest

from mayfly_protocol.requests import ChatPrompt
from mayfly_protocol.serving import Rejected, Submit
from mayfly_server.http.api_keys import from_environment
from support import front_client as harness
from support.doubles.fake_node import PROMPT_TOKENS, FakeNode, ScriptStep, accept, finish, step
from support.front_client import breaking, everything, following, named_events
from support.running_front import RunningFront

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
TOOL = {"name": "sum", "description": "Adds.", "input_schema": {"type": "object"}}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def body(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"max_tokens": 10, "messages": list(messages) or [user("hi")], **fields}


def prompt_of(front: RunningFront, node: FakeNode, **asked: Any) -> ChatPrompt:
    return harness.prompt_of(front, node, PATH, body(**asked))


def refused(front: RunningFront, asked: dict[str, Any], path: str = PATH) -> str:
    response = front.client.post(path, json=asked)
    assert response.status_code == 400
    content = response.json()
    assert content["type"] == "error"
    assert content["error"]["type"] == "invalid_request_error"
    assert content["request_id"] == response.headers["request-id"]
    return str(content["error"]["message"])


def test_blocks_become_messages(front: RunningFront, node: FakeNode) -> None:
    prompt = prompt_of(
        front,
        node,
        system=[{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
        tools=[TOOL],
        messages=[
            user("hi"),
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm. ", "signature": "x"},
                    {"type": "redacted_thinking", "data": "abc"},
                    {"type": "text", "text": "Let me "},
                    {"type": "text", "text": "see."},
                    {"type": "tool_use", "id": "t1", "name": "sum", "input": {"x": 1}},
                    {"type": "tool_use", "id": "t2", "name": "sum", "input": {}},
                ],
            },
            user(
                [
                    {"type": "tool_result", "tool_use_id": "t1", "content": "1"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "t2",
                        "is_error": True,
                        "content": [{"type": "text", "text": "no y"}],
                    },
                    {"type": "text", "text": "Go on."},
                ]
            ),
            {"role": "system", "content": "Be careful."},
            user([{"type": "tool_result", "tool_use_id": "t3"}]),
        ],
    )
    assert prompt.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "Hm. ",
            "tool_calls": [
                {
                    "id": "t1",
                    "type": "function",
                    "function": {"name": "sum", "arguments": {"x": 1}},
                },
                {"id": "t2", "type": "function", "function": {"name": "sum", "arguments": {}}},
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "1"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: no y"},
        {"role": "user", "content": "Go on."},
        {"role": "system", "content": "Be careful."},
        {"role": "tool", "tool_call_id": "t3", "content": ""},
    )
    assert prompt.tools == (
        {
            "type": "function",
            "function": {
                "name": "sum",
                "description": "Adds.",
                "parameters": {"type": "object"},
            },
        },
    )


def test_a_last_message_of_the_assistants_is_gone_on_with(
    front: RunningFront, node: FakeNode
) -> None:
    prompt = prompt_of(
        front, node, messages=[user("hi"), {"role": "assistant", "content": "Well,"}]
    )
    assert (prompt.add_generation_prompt, prompt.continue_final_message) == (False, True)
    prompt = prompt_of(front, node)
    assert (prompt.add_generation_prompt, prompt.continue_final_message) == (True, False)


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        (None, ("auto", None, True)),
        ({"type": "auto", "disable_parallel_tool_use": True}, ("auto", None, False)),
        ({"type": "any"}, ("required", None, True)),
        ({"type": "tool", "name": "sum"}, ("required", "sum", True)),
        ({"type": "none"}, ("none", None, True)),
    ],
)
def test_tool_choices(front: RunningFront, node: FakeNode, choice: Any, wanted: Any) -> None:
    prompt = prompt_of(front, node, tools=[TOOL], tool_choice=choice)
    assert (prompt.tool_choice, prompt.forced_tool, prompt.parallel_tool_calls) == wanted


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, {}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking": {"type": "adaptive"}}, {"enable_thinking": True}),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 2048}},
            {"enable_thinking": True, "thinking_budget": 2048},
        ),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
        (
            {
                "thinking": {"type": "disabled"},
                "chat_template_kwargs": {"enable_thinking": True, "tone": "warm", "date": None},
            },
            {"enable_thinking": True, "tone": "warm"},
        ),
    ],
)
def test_thinking(front: RunningFront, node: FakeNode, fields: Any, wanted: Any) -> None:
    assert prompt_of(front, node, **fields).template_kwargs == wanted


def test_sampling_and_ending(front: RunningFront, node: FakeNode) -> None:
    asked = body(temperature=0.5, top_p=0.9, top_k=7, stop_sequences=["a", "b"])
    assert front.client.post(PATH, json=asked).status_code == 200
    generation = node.workers[0].submits[-1].generation
    sampling, ending = generation.sampling, generation.ending
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
    assert (ending.max_tokens, ending.stop) == (10, ("a", "b"))


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({"messages": [user("hi")], "stream": False}, "max_tokens: Field required."),
        (body(max_tokens=0), "max_tokens: "),
        (body() | {"messages": []}, "messages: "),
        (body({"role": "tool", "content": "x"}), "messages.0.role: "),
        (body(user(5)), "messages.0.content: "),
        (body(user([{"type": "video", "source": {}}])), "messages.0.content.0.type: "),
        (body(user([{"type": "image"}])), "messages.0.content.0.source: Field required."),
        (body(user([{"text": "no type"}])), "messages.0.content.0.type: "),
        (body(user(["hi"])), "messages.0.content.0"),
        (body(user([{"type": "text"}])), "messages.0.content.0.text: Field required."),
        (body(user([{"type": "text", "text": 5}])), "messages.0.content.0.text: "),
        (body(user([{"type": "text", "text": "a", "b": 1}])), "messages.0.content.0.b: "),
        (
            body(user([{"type": "tool_use", "id": "t", "name": "f", "input": {}}])),
            "messages.0.content.0: A tool_use block belongs",
        ),
        (
            body(user([{"type": "tool_use", "id": "t", "name": "f", "input": []}])),
            "messages.0.content.0.input: ",
        ),
        (
            body({"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "t"}]}),
            "messages.0.content.0: A tool_result block belongs",
        ),
        (
            body(
                user("hi"),
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}],
                },
            ),
            "messages: a tool_use has to be followed",
        ),
        (body(temperature=1.5), "temperature: "),
        (body(top_k=-1), "top_k: "),
        (body(stop_sequences=[""]), "stop_sequences.0: "),
        (body(container="x"), "container: This server runs no code"),
        (body(thinking={"type": "enabled"}), "thinking.budget_tokens "),
        (body(thinking={"type": "disabled", "budget_tokens": 9}), "thinking.budget_tokens "),
        (body(tools=[TOOL, TOOL]), "tools: two tools"),
        (body(tool_choice={"type": "any"}), "tool_choice: the request has no tools"),
        (body(tools=[TOOL], tool_choice={"type": "tool", "name": "f"}), "tool_choice.name: "),
        (body(tools=[TOOL], tool_choice={"type": "auto", "name": "sum"}), "tool_choice.name: "),
        (body(output_config={"format": {"type": "json_schema"}}), "output_config.format.schema: "),
        (body(context_management={"edits": [{"type": "banana"}]}), "context_management.edits.0."),
    ],
)
def test_what_is_refused(front: RunningFront, asked: dict[str, Any], problem: str) -> None:
    assert refused(front, asked).startswith(problem)
    if set(asked) <= {"messages", "tools", "tool_choice", "thinking", "system"}:
        assert refused(front, asked, COUNT).startswith(problem)


def test_what_a_client_wrote_is_not_repeated(front: RunningFront) -> None:
    secret = "secret-word"
    for asked in (
        body(user([{"type": secret}])),
        body({"role": secret, "content": "a"}),
        body(user([{"type": "text", "text": "a", secret + " ": 1}])),
    ):
        assert secret not in refused(front, asked)


def test_a_stream_of_everything() -> None:
    with following(everything) as front:
        whole = front.client.post(PATH, json=body()).json()
        events = named_events(front.client.post(PATH, json=body(stream=True)))
    anthropic.types.Message.model_validate(whole, strict=True)
    assert [block["type"] for block in whole["content"]] == [
        "thinking",
        "text",
        "tool_use",
        "tool_use",
    ]
    assert whole["content"][2]["input"] == {"x": 1}
    assert whole["usage"]["input_tokens"] == 5
    assert whole["usage"]["cache_read_input_tokens"] == 2
    assert whole["usage"]["output_tokens"] == 7
    kinds = [event["type"].removeprefix("content_block_") for event in events]
    assert kinds == [
        "message_start",
        *("start", "delta", "delta", "stop"),
        *("start", "delta", "delta", "stop"),
        *("start", "delta", "delta", "stop"),
        *("start", "delta", "stop"),
        "message_delta",
        "message_stop",
    ]
    assert [event["index"] for event in events if "index" in event] == [
        *[0] * 4,
        *[1] * 4,
        *[2] * 4,
        *[3] * 3,
    ]
    assert events[0]["message"]["usage"]["input_tokens"] == 7
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"] == whole["usage"]


def test_stop_sequences_are_named() -> None:
    def stopped(submit: Submit) -> Iterator[ScriptStep]:
        yield accept(submit)
        yield step(submit, 0, "a", finish="stop", stop="END")
        yield finish(submit, 1)

    with following(stopped) as front:
        asked = body(stop_sequences=["END"])
        whole = front.client.post(PATH, json=asked).json()
        events = named_events(front.client.post(PATH, json=asked | {"stream": True}))
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "END")
    assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "END"}


def test_an_error_in_the_middle_is_an_event() -> None:
    with following(breaking) as front:
        response = front.client.post(PATH, json=body(stream=True))
    events = named_events(response)
    assert [event["type"] for event in events[-2:]] == ["content_block_delta", "error"]
    assert events[-1]["error"]["type"] == "api_error"
    assert events[-1]["error"]["details"] == {"error_code": "metal_buffer_size"}
    assert events[-1]["request_id"] == response.headers["request-id"]
    assert "secret" not in response.text
    assert "[DONE]" not in response.text


def test_nobody_can_answer_now() -> None:
    """Anthropic's clients know it as 529, overloaded."""

    def full(submit: Any) -> Iterator[Any]:
        yield Rejected(submit.rid, submit.attempt, "full", "full", retry_after_s=7.0)

    with FakeNode() as node:
        node.worker(full)
        with RunningFront(node.control, queue_wait_s=0.3) as front:
            response = front.client.post(PATH, json=body())
            assert response.status_code == 529
            assert response.json()["error"]["type"] == "overloaded_error"
            assert response.headers["retry-after"] == "7"
            assert response.headers["x-should-retry"] == "true"
            node.show(node.view("slot-1").__class__("slot-1", "tiny", "failed", 1))
            front.wait(lambda: front.client.get("/readyz").status_code == 503)
            assert front.client.post(PATH, json=body()).status_code == 529


def test_tokens_are_counted(front: RunningFront) -> None:
    response = front.client.post(COUNT, json={"messages": [user("hi")], "model": "tiny"})
    assert response.json() == {"input_tokens": PROMPT_TOKENS}
    for field in ("max_tokens", "stream", "temperature"):
        response = front.client.post(COUNT, json={"messages": [user("hi")], field: 1})
        assert response.json() == {"input_tokens": PROMPT_TOKENS}
        assert response.headers["mayfly-ignored"] == field


def test_every_error_has_the_same_shape(node: FakeNode) -> None:
    keys = from_environment({"MAYFLY_API_KEYS": "the-only-key"})
    right = {"x-api-key": "the-only-key"}
    with RunningFront(node.control, keys=keys, max_body_bytes=1000) as front:
        post = front.client.post
        found = [
            (post(PATH, json=body()), 401, "authentication_error"),
            (post(PATH, json=body(model="x"), headers=right), 404, "not_found_error"),
            (post(f"{PATH}/nonsense", json={}, headers=right), 404, "not_found_error"),
            (front.client.get(PATH, headers=right), 405, "invalid_request_error"),
            (post(PATH, json=body(user("x" * 1000)), headers=right), 413, "invalid_request_error"),
            (post(PATH, content="{", headers=right), 400, "invalid_request_error"),
            (
                post(PATH, json=body(), headers=right | {"origin": "https://evil.example"}),
                403,
                "permission_error",
            ),
        ]
    for response, status, kind in found:
        assert response.status_code == status
        content = response.json()
        assert (content["type"], content["error"]["type"]) == ("error", kind)
        assert content["request_id"] == response.headers["request-id"]
        anthropic.types.shared.ErrorResponse.model_validate(content)
