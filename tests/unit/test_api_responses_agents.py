"""OpenAI's responses API as agents use it: tools of every type, items of earlier answers, fields
that ask for nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai.types.responses as wire
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from mayfly_protocol.requests import ChatPrompt
from mayfly_protocol.serving import Rejected, Submit, ToolCallDelta
from mayfly_server.api.responses.responses_tools import CustomInput
from support import front_client as harness
from support.doubles.fake_node import PROMPT_TOKENS, FakeNode, ScriptStep, accept, finish, step
from support.front_client import everything, following, named_events
from support.running_front import RunningFront

PATH = "/v1/responses"
EVENT: TypeAdapter[Any] = TypeAdapter(wire.ResponseStreamEvent)
PATCH = '*** Begin Patch\n+"é\\n" 😀\n*** End Patch\n'
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
SPAWN = {"type": "function", "name": "spawn", "description": "s", "parameters": {"type": "object"}}
AGENTS = {"type": "namespace", "name": "agents", "description": "d", "tools": [SPAWN]}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'}
APPLY = {"type": "custom", "name": "apply_patch", "description": "Edits.", "format": GRAMMAR}
SEARCH = {"type": "web_search", "external_web_access": False}
TOOLS = [FUNCTION, AGENTS, APPLY, SEARCH]


def prompt_of(front: RunningFront, node: FakeNode, **asked: Any) -> ChatPrompt:
    return harness.prompt_of(front, node, PATH, {"input": "hi", **asked})


def names(prompt: ChatPrompt) -> list[str]:
    return [tool["function"]["name"] for tool in prompt.tools]


def calling(*pieces: ToolCallDelta) -> Any:
    """A fake worker's script: answers with these pieces of tool calls."""

    def script(submit: Submit) -> Iterator[ScriptStep]:
        yield accept(submit)
        for number, piece in enumerate(pieces):
            last = number == len(pieces) - 1
            yield step(
                submit, number, "", tool_calls=(piece,), finish="tool_calls" if last else None
            )
        yield finish(submit, len(pieces))

    return script


def test_N01_the_model_gets_every_tool_that_can_be_called(
    front: RunningFront, node: FakeNode
) -> None:
    prompt = prompt_of(front, node, tools=TOOLS)
    assert names(prompt) == ["f", "agents__spawn", "apply_patch"]
    spawn, patch = (tool["function"] for tool in prompt.tools[1:])
    assert spawn["description"] == "agents: d\n\ns"
    assert spawn["parameters"] == {"type": "object"}
    assert patch["description"].startswith("Edits.\n\nThe text goes into the argument `input`.")
    assert GRAMMAR["definition"] in patch["description"]
    assert patch["parameters"] == {
        "type": "object",
        "properties": {"input": {"type": "string"}},
        "required": ["input"],
        "additionalProperties": False,
    }


def test_N01_names_that_clash_stay_apart(front: RunningFront, node: FakeNode) -> None:
    plain = {"type": "function", "name": "agents__spawn"}
    inner = [SPAWN, {"type": "custom", "name": "_spawn"}]
    tools = [AGENTS, plain, {"type": "namespace", "name": "agents_", "tools": inner}]
    prompt = prompt_of(front, node, tools=tools)
    assert names(prompt) == [
        "agents__spawn_2",
        "agents__spawn",
        "agents___spawn",
        "agents____spawn",
    ]
    mcp = {
        "type": "namespace",
        "name": "mcp__fs__",
        "tools": [{"type": "function", "name": "read"}],
    }
    assert names(prompt_of(front, node, tools=[mcp])) == ["mcp__fs__read"]


@pytest.mark.parametrize(
    "tools", [[SPAWN, SPAWN], [AGENTS, AGENTS], [APPLY, FUNCTION | {"name": "apply_patch"}]]
)
def test_N01_two_tools_of_one_name_are_refused(front: RunningFront, tools: Any) -> None:
    response = front.client.post(PATH, json={"input": "hi", "tools": tools})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")


def test_N01_calls_come_back_as_the_client_knows_the_tools() -> None:
    arguments = json.dumps({"input": PATCH})
    pieces = (
        ToolCallDelta(0, "{}", "c1", "agents__spawn"),
        ToolCallDelta(1, "", "c2", "apply_patch"),
        *(ToolCallDelta(1, character) for character in arguments),
        ToolCallDelta(2, "{}", "c3", "f"),
    )
    with following(calling(*pieces)) as front:
        body = {"input": "hi", "tools": TOOLS}
        whole = front.client.post(PATH, json=body).json()
        events = named_events(front.client.post(PATH, json=body | {"stream": True}))
    wire.Response.model_validate(whole)
    spawn, patch, plain = whole["output"]
    assert (spawn["type"], spawn["namespace"], spawn["name"]) == (
        "function_call",
        "agents",
        "spawn",
    )
    assert (patch["type"], patch["name"], patch["input"]) == (
        "custom_tool_call",
        "apply_patch",
        PATCH,
    )
    assert (plain["type"], plain["name"]) == ("function_call", "f")
    assert "namespace" not in plain
    assert "namespace" not in patch
    deltas = [e["delta"] for e in events if e["type"] == "response.custom_tool_call_input.delta"]
    assert len(deltas) > 1
    [done] = [e for e in events if e["type"] == "response.custom_tool_call_input.done"]
    assert "".join(deltas) == done["input"] == PATCH
    for event in events:
        harness_event(event)
    items = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert [{**item, "id": ""} for item in items] == [
        {**item, "id": ""} for item in whole["output"]
    ]
    assert events[-1]["response"]["output"] == items


def harness_event(event: dict[str, Any]) -> None:
    from pydantic import TypeAdapter

    TypeAdapter(wire.ResponseStreamEvent).validate_python(event)


@given(st.text(), st.lists(st.integers(0, 40)), st.booleans())
def test_N01_a_custom_input_is_read_in_any_pieces(
    text: str, cuts: list[int], ascii_only: bool
) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
    read, got = CustomInput(), ""
    for cut in cuts:
        got += read.add(arguments[:cut])
        arguments = arguments[cut:]
    got += read.add(arguments) + read.end()
    assert got == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"x": 1, "input": "a"}', "a"),
        ('{"patch": "a"}', '{"patch": "a"}'),
        ('{"input": 5}', '{"input": 5}'),
        ("{}", "{}"),
    ],
)
def test_N01_other_arguments_of_a_custom_tool_come_as_they_are(arguments: str, text: str) -> None:
    read = CustomInput()
    assert read.add(arguments[:3]) + read.add(arguments[3:]) == ""
    assert read.end() == text


def test_N01_calls_of_earlier_answers_are_read_back(front: RunningFront, node: FakeNode) -> None:
    def call(kind: str, id: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "id": f"i{id}", "call_id": id, "status": "completed", **fields}

    exec_ = {"type": "exec", "command": ["ls"], "env": {}}
    prompt = prompt_of(
        front,
        node,
        tools=TOOLS,
        input=[
            {"role": "user", "content": "hi"},
            call("function_call", "1", name="spawn", namespace="agents", arguments="{}"),
            call("custom_tool_call", "2", name="apply_patch", input=PATCH),
            call("function_call", "3", name="run", namespace="gone", arguments='{"a": 1}'),
            call("local_shell_call", "4", action=exec_),
            call("function_call_output", "1", output="one", name="spawn", namespace="agents"),
            call("custom_tool_call_output", "2", output=[{"type": "input_text", "text": "two"}]),
            call("local_shell_call_output", "4", output="four"),
            {"type": "web_search_call", "id": "w", "action": {"type": "search", "query": "q"}},
            {"type": "mcp_call", "id": "m", "name": "n", "arguments": "{}", "output": "five"},
            {"type": "image_generation_call", "id": "g", "result": "aaaa", "status": "completed"},
            {"type": "mcp_list_tools", "id": "l", "server_label": "s", "tools": [{"name": "n"}]},
            {"type": "mcp_approval_request", "id": "r", "name": "n", "arguments": "{}"},
            {"type": "mcp_approval_response", "approval_request_id": "r", "approve": True},
        ],
    )
    called = [
        (call["id"], call["function"]["name"], call["function"]["arguments"])
        for message in prompt.messages
        for call in message.get("tool_calls", ())
    ]
    assert called == [
        ("1", "agents__spawn", {}),
        ("2", "apply_patch", {"input": PATCH}),
        ("3", "gone__run", {"a": 1}),
        ("4", "local_shell", {"action": exec_}),
        ("m", "mcp", {"name": "n", "arguments": "{}"}),
        ("g", "image_generation", {}),
    ]
    results = [m["content"] for m in prompt.messages if m["role"] == "tool"]
    assert results == ["one", "two", "four", "five", "[image left out: this model reads text only]"]


F = {"type": "function", "name": "f"}
ALLOWED = {"type": "allowed_tools", "mode": "required", "tools": [F]}


@pytest.mark.parametrize(
    ("choice", "mode", "forced", "offered"),
    [
        ({"type": "custom", "name": "apply_patch"}, "required", "apply_patch", 3),
        ({"type": "function", "name": "spawn"}, "required", "agents__spawn", 3),
        (
            {"type": "function", "name": "spawn", "namespace": "agents"},
            "required",
            "agents__spawn",
            3,
        ),
        (ALLOWED, "required", None, 1),
        (ALLOWED | {"mode": "auto"}, "auto", None, 1),
        (ALLOWED | {"mode": "auto", "tools": [SEARCH, F]}, "auto", None, 1),
        (
            ALLOWED | {"mode": "auto", "tools": [{"type": "namespace", "name": "agents"}, F]},
            "auto",
            None,
            2,
        ),
        ("none", "none", None, 3),
        ("required", "required", None, 3),
    ],
)
def test_N01_tool_choices(
    front: RunningFront, node: FakeNode, choice: Any, mode: str, forced: str | None, offered: int
) -> None:
    prompt = prompt_of(front, node, tools=TOOLS, tool_choice=choice)
    assert (prompt.tool_choice, prompt.forced_tool) == (mode, forced)
    assert len(prompt.tools) == offered


@pytest.mark.parametrize(
    ("choice", "tools", "named"),
    [
        ({"type": "web_search"}, TOOLS, "web_search"),
        ({"type": "mcp", "server_label": "s"}, TOOLS, "mcp"),
        ({"type": "custom", "name": "f"}, TOOLS, "no tool has this name"),
        ({"type": "dance"}, TOOLS, "allowed_tools"),
        ({}, TOOLS, "allowed_tools"),
        ("required", [SEARCH], "web_search"),
        (ALLOWED | {"mode": "auto", "tools": [SEARCH]}, TOOLS, "web_search"),
        (ALLOWED | {"tools": [{"type": "image_generation"}]}, TOOLS, "image_generation"),
        ({"type": "function", "name": "spawn", "namespace": "other"}, TOOLS, "no tool"),
        (
            ALLOWED | {"mode": "auto", "tools": [{"type": "function", "name": "g"}]},
            TOOLS,
            "no tool",
        ),
        (ALLOWED | {"tools": [F, {"type": "custom", "name": "f"}]}, TOOLS, "no tool"),
        (ALLOWED | {"tools": [F, {"type": "namespace", "name": "f"}]}, TOOLS, "no tool"),
        (ALLOWED | {"tools": [F, {"type": {}}]}, TOOLS, "no tool"),
        ({"type": {}}, TOOLS, "Input should be"),
        ({"type": ["function"]}, TOOLS, "Input should be"),
    ],
)
def test_N01_a_choice_of_a_tool_that_cannot_be_called_is_refused(
    front: RunningFront, choice: Any, tools: Any, named: str
) -> None:
    asked = {"input": "hi", "tools": tools, "tool_choice": choice}
    response = front.client.post(PATH, json=asked)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "tool_choice")
    assert named in error["message"]


def test_N01_hosted_tools_alone_are_refused(front: RunningFront, node: FakeNode) -> None:
    response = front.client.post(PATH, json={"input": "hi", "tools": [SEARCH]})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "tools")
    assert "web_search" in error["message"]
    assert prompt_of(front, node, tools=[SEARCH], tool_choice="none").tools == ()


def test_N01_a_regular_expression_is_a_part_of_the_schema(
    front: RunningFront, node: FakeNode
) -> None:
    tool = APPLY | {"format": {"type": "grammar", "syntax": "regex", "definition": "a|b"}}
    function = prompt_of(front, node, tools=[tool]).tools[0]["function"]
    assert function["parameters"]["properties"]["input"]["pattern"] == "^(?:a|b)$"


def test_N01_tools_that_come_with_the_items(front: RunningFront, node: FakeNode) -> None:
    more = {"type": "additional_tools", "role": "developer", "tools": [AGENTS]}
    prompt = prompt_of(
        front, node, tools=[FUNCTION], input=[more, {"role": "user", "content": "a"}]
    )
    assert names(prompt) == ["f", "agents__spawn"]
    assert len(prompt.messages) == 1


FINDER = {
    "type": "tool_search",
    "execution": "client",
    "description": "Finds.",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
}


def test_N01_a_search_for_tools_that_the_client_runs() -> None:
    """Codex offers the tools of MCP servers only after the model has searched for them."""
    prompts: list[Any] = []
    answers = calling(ToolCallDelta(0, '{"query":"a"}', "c1", "tool_search"))

    def script(submit: Submit) -> Iterator[ScriptStep]:
        prompts.append(submit.generation.prompt)
        yield from answers(submit)

    body: dict[str, Any] = {"input": "hi", "tools": [FINDER, FUNCTION]}
    with following(script) as front:
        whole = front.client.post(PATH, json=body).json()
        events = named_events(front.client.post(PATH, json=body | {"stream": True}))
        [call] = whole["output"]
        found = {
            "type": "tool_search_output",
            "call_id": "c1",
            "execution": "client",
            "status": "completed",
            "tools": [AGENTS | {"tools": [SPAWN | {"defer_loading": True}]}],
        }
        server = {"type": "tool_search_call", "call_id": None, "arguments": {}}
        items = [{"role": "user", "content": "hi"}, call, found, found, server]
        assert front.client.post(PATH, json=body | {"input": items}).status_code == 200
    assert {**call, "id": ""} == {
        "id": "",
        "type": "tool_search_call",
        "status": "completed",
        "call_id": "c1",
        "execution": "client",
        "arguments": {"query": "a"},
    }
    for event in events:
        EVENT.validate_python(event)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[2:] == ["output_item.added", "output_item.done", "completed"]
    assert events[3]["item"] | {"id": ""} == call | {"id": ""}
    assert names(prompts[0]) == ["tool_search", "f"]
    assert names(prompts[2]) == ["tool_search", "f", "agents__spawn"]
    _, asked, *results = prompts[2].messages
    assert asked["tool_calls"][0]["function"] == {
        "name": "tool_search",
        "arguments": {"query": "a"},
    }
    assert [result["content"] for result in results] == ["Tools found: agents__spawn"] * 2


def test_N02_a_tool_of_an_unknown_type_is_named(front: RunningFront, node: FakeNode) -> None:
    asked = {"input": "hi", "tools": [FUNCTION, {"type": "teleport", "x": 1}]}
    assert front.client.post(PATH, json=asked).headers["mayfly-ignored"] == "tools"
    asked = {"input": "hi", "include": ["teleport.results"], "tools": TOOLS}
    assert front.client.post(PATH, json=asked).headers["mayfly-ignored"] == "include"
    with RunningFront(node.control, strict_fields=True) as strict:
        assert strict.client.post(PATH, json=asked).json()["error"]["param"] == "include"


HINTS: dict[str, Any] = {
    "client_metadata": {"session_id": "s"},
    "metadata": {"attempt": 1},
    "text": {"verbosity": "low"},
    "reasoning": {"effort": "medium", "summary": "detailed", "context": "all_turns"},
    "truncation": "auto",
    "priority": 0,
    "service_tier": "flex",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"mode": "explicit", "ttl": "30m"},
    "include": ["web_search_call.action.sources", "file_search_call.results"],
    "max_tool_calls": 0,
    "stream_options": {},
    "store": False,
    "background_options": {"completion_window": "soonest"},
    "image": {"context_compression": "auto"},
}


@pytest.mark.parametrize("stream", [False, True])
def test_N02_what_asks_for_nothing_is_taken(front: RunningFront, stream: bool) -> None:
    response = front.client.post(PATH, json={"input": "hi", "stream": stream, **HINTS})
    assert response.status_code == 200, response.text
    assert "mayfly-ignored" not in response.headers
    answer = named_events(response)[-1]["response"] if stream else response.json()
    wire.Response.model_validate(answer)
    assert answer["text"]["verbosity"] == "low"
    assert answer["reasoning"] == {"effort": "medium", "summary": "detailed"}
    assert (answer["truncation"], answer["max_tool_calls"]) == ("auto", 0)
    assert (answer["store"], answer["service_tier"]) == (False, "default")


@pytest.mark.parametrize("kind", ["function_call_output", "custom_tool_call_output"])
def test_N05_a_picture_in_a_result_becomes_a_note(
    front: RunningFront, node: FakeNode, kind: str
) -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,aaaa", "detail": "high"}
    parts = [{"type": "input_text", "text": "a"}, image, {"type": "input_file", "file_id": "f"}]
    item = {"type": kind, "call_id": "c", "output": parts}
    result = prompt_of(front, node, input=[item]).messages[-1]["content"]
    notes = [f"[{what} left out: this model reads text only]" for what in ("image", "file")]
    assert result == "a" + "".join(notes)
    own = {"input": [{"role": "user", "content": [image]}]}
    error = front.client.post(PATH, json=own).json()["error"]
    assert error["param"] == "input[0].content[0].type"
    assert "reads text only" in error["message"]


NOTHING: dict[str, Any] = {"parsed": None, "extra": [], "hint": {}, "phase": None, "status": None}


def test_N07_items_come_back_with_what_sdks_add(front: RunningFront, node: FakeNode) -> None:
    text = {
        "type": "output_text",
        "text": "{}",
        "annotations": [],
        "logprobs": [],
        "parsed": {"a": 1},
    }
    items = [
        {"role": "user", "content": "a", **NOTHING},
        {"type": "reasoning", "id": "r", "summary": [], "content": None, **NOTHING},
        {"type": "message", "id": "m", "role": "assistant", "content": [text], **NOTHING},
        {
            "type": "function_call",
            "call_id": "c",
            "name": "f",
            "arguments": "{}",
            "parsed_arguments": {},
            "namespace": None,
            "caller": {"type": "direct"},
            **NOTHING,
        },
        {"type": "function_call_output", "call_id": "c", "output": [], **NOTHING},
    ]
    prompt = prompt_of(front, node, input=items)
    assert [message["role"] for message in prompt.messages] == ["user", "assistant", "tool"]


def test_reasoning_comes_back_from_clients_that_send_no_content() -> None:
    """Codex leaves out the content of a reasoning item, and keeps its encrypted content."""
    prompts: list[Any] = []

    def script(submit: Submit) -> Iterator[ScriptStep]:
        prompts.append(submit.generation.prompt)
        return everything(submit)

    include = ["reasoning.encrypted_content"]
    with following(script) as front:
        bare = front.client.post(PATH, json={"input": "hi"}).json()["output"][0]
        events = named_events(
            front.client.post(PATH, json={"input": "hi", "include": include, "stream": True})
        )
        output = events[-1]["response"]["output"]
        assert output == [e["item"] for e in events if e["type"] == "response.output_item.done"]
        sent = {key: output[0][key] for key in ("type", "summary", "encrypted_content")}
        others = [
            sent | {"encrypted_content": text} for text in ("gAAAAAB", "mayfly:?", "mayfly:/w==")
        ]
        for item in (sent, *others):
            asked = {"input": [{"role": "user", "content": "a"}, item, *output[1:3]]}
            assert front.client.post(PATH, json=asked).status_code == 200
    assert bare["encrypted_content"] is None
    read = [prompt.messages[1].get("reasoning_content") for prompt in prompts[2:]]
    assert read == ["Hm.", None, None, None]


def test_N25_a_full_context_is_a_400_with_its_code() -> None:
    def script(submit: Submit) -> Iterator[ScriptStep]:
        yield Rejected(
            submit.rid, submit.attempt, "invalid", "long", prompt_tokens=9000, context=8192
        )

    with following(script) as front:
        for stream in (False, True):
            response = front.client.post(PATH, json={"input": "hi", "stream": stream})
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
            assert "maximum context length is 8192 tokens" in error["message"]


@pytest.mark.parametrize("item", [{"type": "item_reference", "id": "fc_1"}, {"id": "fc_1"}])
def test_N20_a_reference_is_refused_with_the_remedy(front: RunningFront, item: Any) -> None:
    response = front.client.post(PATH, json={"input": [{"role": "user", "content": "a"}, item]})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "input[1]")
    assert error["code"] == "unsupported_parameter"
    assert "set store to false" in error["message"]
    assert error["message"].count(".") == 1


def test_N20_storing_is_refused_with_the_remedy(front: RunningFront) -> None:
    error = front.client.post(PATH, json={"input": "a", "store": True}).json()["error"]
    assert error["param"] == "store"
    assert "set store to false" in error["message"]


def test_prompts_can_be_counted(front: RunningFront) -> None:
    asked = {"input": "hi", "tools": TOOLS, "tool_choice": "required", "max_output_tokens": 5}
    response = front.client.post(f"{PATH}/input_tokens", json=asked)
    assert response.json() == {"object": "response.input_tokens", "input_tokens": PROMPT_TOKENS}
    assert response.headers["mayfly-ignored"] == "max_output_tokens"
    wrong = front.client.post(f"{PATH}/input_tokens", json={"input": []})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "input")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "compact"),
        ("GET", "resp_1"),
        ("DELETE", "resp_1"),
        ("POST", "resp_1/cancel"),
        ("GET", "resp_1/input_items"),
    ],
)
def test_what_only_a_server_that_stores_has_is_a_404(
    front: RunningFront, method: str, path: str
) -> None:
    response = front.client.request(method, f"{PATH}/{path}")
    assert response.status_code == 404
    assert " here" in response.json()["error"]["message"]
