"""Tool calls, complete and malformed. docs/reported-faults.md lists the ids in test names."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.api_client import (
    CHAT,
    Json,
    answer,
    choice,
    function,
    refused,
    stream,
    user,
    whole_stream,
)
from support.scripted_answers import (
    CALL,
    CUT_SHORT,
    NO_OBJECT,
    NOT_JSON,
    NOTHING_INSIDE,
    SECOND_CALL,
    UNKNOWN,
)
from support.server import Server

SUM = function("sum", x="integer", y="integer")
GLOB = function("glob", pattern="string")
TOOLS = [SUM, GLOB]


def both(server: Server, text: str, **fields: Any) -> Json:
    """The choice of an answer, which has to be the same when it is streamed."""
    asked: Json = {"messages": [user(text)], "max_tokens": 200, **fields}
    whole = choice(server, CHAT, **asked)
    streamed = whole_stream(server, CHAT, **asked)
    message = whole["message"]
    assert streamed.text() == (message["content"] or "")
    assert streamed.text(key="reasoning_content") == message.get("reasoning_content", "")
    assert streamed.finish() == whole["finish_reason"]
    calls = [
        {"name": call["name"], "arguments": call["arguments"]} for call in streamed.calls().values()
    ]
    assert calls == [call["function"] for call in message.get("tool_calls", [])]
    assert len({chunk["id"] for chunk in streamed.chunks}) == 1
    return whole


@pytest.mark.parametrize(
    ("trigger", "text", "reason"),
    [
        ("[not json]", NOT_JSON, "stop"),
        ("[unknown]", UNKNOWN, "stop"),
        ("[no object]", NO_OBJECT, "stop"),
    ],
)
def test_R07_calls_that_cannot_be_read_are_text(
    script: Server, trigger: str, text: str, reason: str
) -> None:
    found = both(script, trigger, tools=TOOLS)
    assert (found["text"], found["finish_reason"]) == (text, reason)
    assert "tool_calls" not in found["message"]
    assert both(script, "[text]", tools=TOOLS)["text"] == "Just text."


def test_R07_a_call_that_is_cut_off_is_no_call(script: Server) -> None:
    found = both(script, "[call]", tools=TOOLS, max_tokens=5)
    assert found["finish_reason"] == "length"
    assert CALL.startswith(found["text"]) and found["text"]
    assert "tool_calls" not in found["message"]


def test_R07_a_call_that_ends_too_early_is_an_error_once_it_has_begun(script: Server) -> None:
    """Without a stream nothing was sent, and it is text."""
    asked: Json = {"messages": [user("[cut short]")], "tools": TOOLS, "max_tokens": 200}
    whole = choice(script, CHAT, **asked)
    assert (whole["text"], whole["finish_reason"]) == (CUT_SHORT, "stop")
    assert "tool_calls" not in whole["message"]
    streamed = stream(script, CHAT, **asked)
    assert [error["code"] for error in streamed.errors] == ["unreadable_tool_call"]
    [call] = streamed.calls().values()
    assert CUT_SHORT.endswith(call["arguments"] + "7") and not streamed.done


def test_N26_arguments_come_as_they_are_generated(script: Server) -> None:
    asked: Json = {"messages": [user("[call]")], "tools": TOOLS, "max_tokens": 200}
    streamed = whole_stream(script, CHAT, **asked)
    pieces = [c["delta"]["tool_calls"] for c in streamed.of(0) if "tool_calls" in c["delta"]]
    assert len(pieces) >= 2  # more where the front end keeps up with the model
    assert streamed.calls()[0]["arguments"] == '{"x": 7, "y": 4}'


def test_R07_what_is_cut_off_after_a_call_was_not_all(script: Server) -> None:
    """The call can be made, and every API says that the answer is not whole."""
    found = both(script, "[two calls]", tools=TOOLS, max_tokens=40)
    assert found["finish_reason"] == "length"
    assert len(found["message"]["tool_calls"]) == 1
    assert SECOND_CALL.startswith(found["text"].strip())
    tool = {"name": "sum", "parameters": {"type": "object"}, "type": "function"}
    asked = {"input": "[two calls]", "tools": [tool], "max_output_tokens": 40}
    response = script.post("/v1/responses", asked).json()
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    tool = {"name": "sum", "input_schema": {"type": "object"}}
    asked = {"messages": [user("[two calls]")], "tools": [tool], "max_tokens": 40}
    assert script.post("/v1/messages", asked).json()["stop_reason"] == "max_tokens"


def test_R09_a_call_of_nothing(script: Server) -> None:
    found = both(script, "[nothing inside]", tools=TOOLS)
    assert (found["text"], found["finish_reason"]) == (NOTHING_INSIDE, "stop")
    assert "tool_calls" not in found["message"]


@pytest.mark.parametrize("fields", [{"tools": [], "tool_choice": "none"}, {"tool_choice": "none"}])
@pytest.mark.parametrize("trigger", ["[colours]", "[call]", "[text]"])
def test_R10_no_tools_no_calls(script: Server, fields: Json, trigger: str) -> None:
    found = both(script, f"name two colours as a JSON list {trigger}", **fields)
    assert "tool_calls" not in found["message"]
    assert isinstance(found["text"], str)
    assert found["finish_reason"] == "stop"


def test_R10_none_turns_calls_off(script: Server) -> None:
    found = both(script, "[call]", tools=TOOLS, tool_choice="none")
    assert (found["text"], found["finish_reason"]) == (CALL, "stop")
    assert "tool_calls" not in found["message"]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "wanted", ["required", {"type": "function", "function": {"name": "bounded"}}], ids=str
)
def test_R12_a_call_that_is_required_is_made(tiny: Server, wanted: Any, seed: int) -> None:
    """Random weights make the call, although their plain answer would never be one."""
    bounded = function("bounded", yes="boolean")
    bounded["function"]["parameters"]["required"] = ["yes"]
    found = both(
        tiny,
        "what is the time?",
        tools=[bounded, SUM] if wanted != "required" else [bounded],
        tool_choice=wanted,
        parallel_tool_calls=False,
        temperature=1.5,
        seed=seed,
    )
    assert found["finish_reason"] == "tool_calls"
    assert found["message"]["content"] is None
    [call] = found["message"]["tool_calls"]
    assert call["function"]["name"] == "bounded"
    arguments = json.loads(call["function"]["arguments"])
    assert arguments in ({"yes": True}, {"yes": False})


def test_R12_a_required_call_that_is_cut_off_is_no_call(tiny: Server) -> None:
    found = both(tiny, "what is the time?", tools=TOOLS, tool_choice="required", max_tokens=6)
    assert found["finish_reason"] == "length"
    assert found["text"].startswith('[{"name":"')
    assert "tool_calls" not in found["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [SUM], "tool_choice": "sometimes"},
        {"tools": [SUM], "tool_choice": {"type": "function", "function": {"name": "other"}}},
        {"tools": [SUM], "tool_choice": {"type": "function"}},
        {"tools": [SUM], "tool_choice": 1},
        {"tool_choice": "required"},
        {"tools": [], "tool_choice": "required"},
        {"tools": None, "tool_choice": "required"},
    ],
)
def test_R12_a_choice_that_cannot_be_made(tiny: Server, fields: Json) -> None:
    refused(tiny.post(CHAT, {"messages": [user("hi")], **fields}), "tool_choice")


@pytest.mark.parametrize("n", [1, 2])
def test_R13_two_calls_in_one_turn(script: Server, n: int) -> None:
    asked: Json = {"messages": [user("[two calls]")], "tools": TOOLS, "max_tokens": 200, "n": n}
    streamed = whole_stream(script, CHAT, **asked)
    whole = answer(script, CHAT, **asked)
    assert len({chunk["id"] for chunk in streamed.chunks}) == 1
    ids = set()
    for index, one in enumerate(whole["choices"]):
        calls = streamed.calls(index)
        assert list(calls) == [0, 1]
        assert [call["name"] for call in calls.values()] == ["sum", "glob"]
        arguments = [json.loads(call["arguments"]) for call in calls.values()]
        assert arguments == [{"x": 7, "y": 4}, {"pattern": "*.txt"}]
        assert streamed.finish(index) == one["finish_reason"] == "tool_calls"
        assert [call["function"] for call in one["message"]["tool_calls"]] == [
            {"name": call["name"], "arguments": call["arguments"]} for call in calls.values()
        ]
        ids |= {call["id"] for call in calls.values()}
    assert len(ids) == 2 * n


def test_R13_only_one_call_where_parallel_ones_are_refused(script: Server) -> None:
    found = both(script, "[two calls]", tools=TOOLS, parallel_tool_calls=False)
    assert [call["function"]["name"] for call in found["message"]["tool_calls"]] == ["sum"]
    assert found["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("trigger", "content", "calls"),
    [
        ("[call]", None, 1),
        ("[said and called]", "Let me see.\n", 1),
        ("[thinks]", None, 1),
        ("[text]", "Just text.", 0),
    ],
)
def test_R14_the_finish_reason_says_whether_tools_were_called(
    script: Server, trigger: str, content: str | None, calls: int
) -> None:
    found = both(script, trigger, tools=TOOLS)
    assert found["finish_reason"] == ("tool_calls" if calls else "stop")
    assert len(found["message"].get("tool_calls", [])) == calls
    assert found["message"]["content"] == content
    assert found["message"].get("reasoning_content") == (
        "Seven, four." if trigger == "[thinks]" else None
    )
