"""OpenAI's responses API: requests as they reach the worker, events, and errors in the middle of a
stream."""

from __future__ import annotations

from typing import Any

import httpx
import openai.types.responses as wire
import pytest
from pydantic import TypeAdapter

from mayfly_protocol.requests import ChatPrompt
from support import front_client as harness
from support.doubles.fake_node import FakeNode
from support.front_client import breaking, everything, following, named_events
from support.running_front import RunningFront

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "sum", "parameters": {"type": "object"}}
EVENT: TypeAdapter[Any] = TypeAdapter(wire.ResponseStreamEvent)


def prompt_of(front: RunningFront, node: FakeNode, **asked: Any) -> ChatPrompt:
    return harness.prompt_of(front, node, PATH, {"input": "hi", **asked})


def call(id: str, arguments: str = "{}") -> dict[str, Any]:
    return {"type": "function_call", "call_id": id, "name": "sum", "arguments": arguments}


def thought(text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": content}


def said(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    return {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": content,
    }


def test_items_become_messages(front: RunningFront, node: FakeNode) -> None:
    prompt = prompt_of(
        front,
        node,
        instructions="Be brief.",
        input=[
            {"role": "developer", "content": "Be kind."},
            {"role": "user", "content": [{"type": "input_text", "text": "h"}] * 2},
            thought("Hm."),
            said("Let me see."),
            call("c1", '{"x": 1}'),
            call("c2", " "),
            {"type": "function_call_output", "call_id": "c1", "output": "1"},
            {
                "type": "function_call_output",
                "call_id": "c2",
                "output": [{"type": "input_text", "text": "2"}],
            },
            thought("So."),
            call("c3", '{"x": "cut o'),
            {"type": "function_call_output", "call_id": "c3", "output": "3"},
            said("One."),
            said("Two."),
            {"type": "reasoning", "summary": [], "encrypted_content": "abc"},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        ],
    )

    def calls(*made: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            {"id": id, "type": "function", "function": {"name": "sum", "arguments": arguments}}
            for id, arguments in made
        ]

    assert prompt.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hh"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "Hm.",
            "tool_calls": calls(("c1", {"x": 1}), ("c2", {})),
        },
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "tool", "tool_call_id": "c2", "content": "2"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "So.",
            "tool_calls": calls(("c3", {"unreadable_arguments": '{"x": "cut o'})),
        },
        {"role": "tool", "tool_call_id": "c3", "content": "3"},
        {"role": "assistant", "content": "One."},
        {"role": "assistant", "content": "Two."},
        {"role": "assistant", "content": "No."},
    )


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        (None, ("auto", None)),
        ("none", ("none", None)),
        ("required", ("required", None)),
        ({"type": "function", "name": "sum"}, ("required", "sum")),
    ],
)
def test_tool_choices(front: RunningFront, node: FakeNode, choice: Any, wanted: Any) -> None:
    prompt = prompt_of(front, node, tools=[TOOL], tool_choice=choice)
    assert (prompt.tool_choice, prompt.forced_tool) == wanted
    function = {"name": "sum", "parameters": {"type": "object"}}
    assert prompt.tools == ({"type": "function", "function": function},)


def test_effort(front: RunningFront, node: FakeNode) -> None:
    assert prompt_of(front, node).template_kwargs == {}
    high = prompt_of(front, node, reasoning={"effort": "high"})
    assert high.template_kwargs == {"reasoning_effort": "high"}
    none = prompt_of(front, node, reasoning={"effort": "none"})
    assert none.template_kwargs == {"reasoning_effort": "none", "enable_thinking": False}


def test_F09_variables_of_the_template_go_before_the_effort(
    front: RunningFront, node: FakeNode
) -> None:
    kwargs = {"enable_thinking": True, "date_string": "1 May", "tone": None}
    prompt = prompt_of(front, node, reasoning={"effort": "none"}, chat_template_kwargs=kwargs)
    assert prompt.template_kwargs == {
        "reasoning_effort": "none",
        "enable_thinking": True,
        "date_string": "1 May",
    }


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "dog", "content": "a"}]}, "input[0].role"),
        ({"input": [{"content": "a"}]}, "input[0].type"),
        ({"input": ["hi"]}, "input[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": 1}]}]},
            "input[0].content[0].text",
        ),
        ({"input": [{"type": "reasoning"}]}, "input"),
        ({"input": [{"type": "computer"}]}, "input[0].type"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0]"),
        ({"input": "a", "tools": [{"name": "f"}]}, "tools[0]"),
        ({"input": "a", "tools": [TOOL | {"async": True}]}, "tools[0].async"),
        ({"input": "a", "tools": [{"type": "function"}]}, "tools[0].name"),
        ({"input": "a", "tools": [TOOL, TOOL]}, "tools"),
        ({"input": "a", "tool_choice": "required"}, "tool_choice"),
        ({"input": "a", "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"input": "a", "truncation": "all"}, "truncation"),
        ({"input": "a", "store": True}, "store"),
        ({"input": "a", "store": 1}, "store"),
        ({"input": "a", "previous_response_id": "r"}, "previous_response_id"),
        ({"input": "a", "background": True}, "background"),
        ({"input": "a", "max_tool_calls": -1}, "max_tool_calls"),
        ({"input": "a", "context_management": [{"type": "compaction"}]}, "context_management"),
        ({"input": "a", "prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm"),
        ({"input": "a", "top_logprobs": 3}, "top_logprobs"),
        ({"input": "a", "stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"input": "a", "text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"input": "a", "text": {"format": {"type": "json_schema"}}}, "text.format.name"),
        ({"input": "a", "reasoning": {"mode": "pro"}}, "reasoning.mode"),
        (
            {
                "input": "a",
                "tools": [TOOL],
                "tool_choice": "required",
                "text": {"format": {"type": "json_object"}},
            },
            "tool_choice",
        ),
    ],
)
def test_what_is_refused(front: RunningFront, asked: dict[str, Any], param: str) -> None:
    response = front.client.post(PATH, json=asked)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    events = named_events(response)
    for event in events:
        EVENT.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def test_a_stream_of_everything() -> None:
    with following(everything) as front:
        whole = front.client.post(PATH, json={"input": "hi"}).json()
        streamed = front.client.post(PATH, json={"input": "hi", "stream": True})
    wire.Response.model_validate(whole)
    assert [item["type"] for item in whole["output"]] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert whole["output"][2]["arguments"] == '{"x":1}'
    assert whole["usage"]["input_tokens_details"]["cached_tokens"] == 2
    events = events_of(streamed)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added"),
        *("reasoning_text.delta", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        "output_item.added",
        *("function_call_arguments.delta", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        "output_item.added",
        *("function_call_arguments.delta", "function_call_arguments.done"),
        "output_item.done",
        "completed",
    ]
    last = events[-1]["response"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert last["output"] == done

    def nameless(response: dict[str, Any]) -> dict[str, Any]:
        """Ids are each request's own."""
        bare = {k: v for k, v in response.items() if k not in ("id", "created_at")}
        items = [{k: v for k, v in item.items() if k != "id"} for item in response["output"]]
        return bare | {"output": items}

    assert nameless(last) == nameless(whole)


def test_an_error_in_the_middle() -> None:
    with following(breaking) as front:
        response = front.client.post(PATH, json={"input": "hi", "stream": True})
    last = events_of(response)[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == "server_error"
    assert "secret" not in response.text
    assert "[DONE]" not in response.text
