"""Fields of a chat request. docs/reported-faults.md lists ids such as R21 in test names."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mayfly_protocol.requests import ChatPrompt, Constraint
from support.front_client import CHAT, TEXT, TOOL, Client


def test_R21_empty_messages(client: Client) -> None:
    for stream in (False, True):
        error = client.refused(CHAT, messages=[], stream=stream)
        assert error["code"] == "empty_array"


def test_R12_tool_choice(client: Client) -> None:
    prompt = client.taken(CHAT, tools=[TOOL], tool_choice="required").generation.prompt
    assert isinstance(prompt, ChatPrompt)
    assert (prompt.tool_choice, prompt.forced_tool) == ("required", None)
    client.refused(CHAT, "tool_choice", tools=[TOOL], tool_choice="sometimes")
    client.refused(CHAT, "tool_choice", tool_choice="required")
    client.refused(CHAT, "tool_choice", tool_choice="required", tools=[])


def test_a_named_tool(client: Client) -> None:
    named = {"type": "function", "function": {"name": "sum"}}
    prompt = client.taken(CHAT, tools=[TOOL], tool_choice=named).generation.prompt
    assert isinstance(prompt, ChatPrompt)
    assert (prompt.tool_choice, prompt.forced_tool, prompt.tools) == ("required", "sum", (TOOL,))
    other = {"type": "function", "function": {"name": "other"}}
    client.refused(CHAT, "tool_choice", tools=[TOOL], tool_choice=other)
    client.refused(CHAT, "tool_choice", tools=[TOOL], tool_choice=named | {"more": 1})
    client.refused(CHAT, "tools", tools=[TOOL, TOOL])


def test_R10_no_tools_to_choose_from(client: Client) -> None:
    for body in ({"tools": []}, {}):
        response = client.post(CHAT, tool_choice="none", **body)
        choice = response.json()["choices"][0]
        assert "tool_calls" not in choice["message"]
        assert isinstance(choice["message"]["content"], str)
        assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"type": "custom"}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([{"type": "function", "function": {}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": "a b"}}], "tools[0].function.name"),
        ([TOOL, {"type": "function", "function": {"name": 5}}], "tools[1].function.name"),
        ({}, "tools"),
    ],
)
def test_bad_tools(client: Client, tools: Any, param: str) -> None:
    client.refused(CHAT, param, tools=tools)


@pytest.mark.parametrize(
    "field",
    [
        *("audio", "web_search_options", "functions", "function_call", "chat_template"),
        *("moderation", "grammar", "ebnf", "mirostat", "samplers", "system"),
        *("instructions", "input", "prompt", "max_output_tokens", "stop_sequences"),
    ],
)
def test_documented_and_not_supported(client: Client, field: str) -> None:
    assert client.refused(CHAT, **{field: {"a": 1}})["code"] == "unsupported_parameter"
    if field != "web_search_options":
        for nothing in ({}, [], "", None):
            client.taken(CHAT, **{field: nothing})


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("store", False, True),
        ("service_tier", "priority", 1),
        ("modalities", ["text"], ["audio"]),
        ("verbosity", "low", "shouting"),
        ("reasoning_effort", "xhigh", "shouting"),
        ("prompt_cache_retention", "24h", 24),
        ("metadata", {"a": 1}, "a"),
        ("safety_identifier", "me", 1),
        ("parallel_tool_calls", False, "false"),
        ("top_logprobs", None, 21),
        ("logprobs", True, 1),
    ],
)
def test_hints_are_taken_and_demands_refused(
    client: Client, field: str, good: Any, bad: Any
) -> None:
    client.taken(CHAT, **{field: good})
    response = client.post(CHAT, **{field: bad})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith(field)


def test_N02_hints_of_any_kind_are_taken(client: Client) -> None:
    hints: dict[str, Any] = {
        "priority": 0,
        "client_metadata": {"session_id": "s"},
        "prediction": {"type": "content", "content": "a"},
        "prompt_cache_options": {"mode": "explicit", "ttl": "30m"},
        "function_call": "auto",
        "response_format": {},
        "use_beam_search": False,
        "truncate_prompt_tokens": -1,
    }
    response = client.post(CHAT, **hints)
    assert response.status_code == 200, response.text
    assert "mayfly-ignored" not in response.headers
    response = client.post(TEXT, priority=0, client_metadata={"a": 1})
    assert (response.status_code, "mayfly-ignored" in response.headers) == (200, False)
    for tier in ("auto", "default", "flex", "scale", "priority", "fast"):
        client.taken(CHAT, service_tier=tier)
    for effort in ("none", "minimal", "low", "medium", "high", "xhigh", "max"):
        client.taken(CHAT, reasoning_effort=effort)


@pytest.mark.parametrize(
    ("asked", "kwargs"),
    [
        ({"enable_thinking": False}, {"enable_thinking": False}),
        ({"reasoning_effort": "none"}, {"enable_thinking": False, "reasoning_effort": "none"}),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 5}},
            {"enable_thinking": True, "thinking_budget": 5},
        ),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking": {"type": "auto"}}, {}),
        ({"reasoning": {"effort": "high"}}, {"reasoning_effort": "high"}),
        ({"reasoning": {"enabled": False, "exclude": False}}, {"enable_thinking": False}),
        (
            {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
            {"enable_thinking": False},
        ),
    ],
)
def test_ways_to_ask_for_thoughts(
    client: Client, asked: dict[str, Any], kwargs: dict[str, Any]
) -> None:
    prompt = client.taken(CHAT, **asked).generation.prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.template_kwargs == kwargs


def test_N01_hosted_tools_beside_functions_are_left_out(client: Client) -> None:
    hosted = [{"type": "web_search", "search_context_size": "low"}, {"type": "code_interpreter"}]
    prompt = client.taken(CHAT, tools=[hosted[0], TOOL, hosted[1]]).generation.prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.tools == (TOOL,)
    client.refused(CHAT, "tools[0].type", tools=hosted)
    builtin = {"type": "builtin_function", "function": {"name": "$web_search"}}  # Kimi's
    client.taken(CHAT, tools=[TOOL, builtin])
    for kind in ("Function", "functions", "tool"):
        own = {"type": kind, "function": {"name": "mine"}}
        client.refused(CHAT, "tools[1].type", tools=[TOOL, own])
    forced = {"type": "function", "function": {"name": "web_search"}}
    client.refused(CHAT, "tool_choice", tools=[hosted[0], TOOL], tool_choice=forced)
    custom = {"type": "custom", "custom": {"name": "patch"}}
    assert "text" in client.refused(CHAT, "tools[1].type", tools=[TOOL, custom])["message"]


def test_N08_marks_on_tools_and_functions(client: Client) -> None:
    marks = {"cache_control": {"type": "ephemeral"}, "copilot_cache_control": {}, "x": None}
    tool = {**TOOL, **marks, "function": {**TOOL["function"], **marks}}
    prompt = client.taken(CHAT, tools=[tool]).generation.prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.tools == (TOOL,)


def test_F09_variables_of_templates_are_checked_by_the_worker(client: Client) -> None:
    client.refused(CHAT, chat_template="{% for i in range(10**9) %}{% endfor %}")
    client.refused(CHAT, chat_template_kwargs=["tokenize"])
    kwargs = {"enable_thinking": False, "thinking": None, "date_string": "1 May", "n": {"a": [1]}}
    prompt = client.taken(
        CHAT, chat_template_kwargs=kwargs, reasoning_effort="low"
    ).generation.prompt
    assert isinstance(prompt, ChatPrompt)
    del kwargs["thinking"]
    assert prompt.template_kwargs == {**kwargs, "reasoning_effort": "low"}


def test_ways_to_end_a_prompt(client: Client) -> None:
    def flags(**body: Any) -> tuple[bool, bool]:
        prompt = client.taken(CHAT, **body).generation.prompt
        assert isinstance(prompt, ChatPrompt)
        return prompt.add_generation_prompt, prompt.continue_final_message

    assert flags() == (True, False)
    assert flags(continue_final_message=True) == (False, True)
    assert flags(add_generation_prompt=False) == (False, False)
    client.refused(CHAT, continue_final_message=True, add_generation_prompt=True)


def test_max_completion_tokens(client: Client) -> None:
    assert client.taken(CHAT, max_completion_tokens=5).generation.ending.max_tokens == 5
    assert client.taken(CHAT, max_completion_tokens=5, max_tokens=5).generation.n == 1
    client.refused(CHAT, max_completion_tokens=5, max_tokens=6)


def test_logprobs_of_chat(client: Client) -> None:
    assert client.taken(CHAT).generation.output.logprobs is None
    assert client.taken(CHAT, logprobs=False).generation.output.logprobs is None
    assert client.taken(CHAT, logprobs=True).generation.output.logprobs == 0
    assert client.taken(CHAT, logprobs=True, top_logprobs=3).generation.output.logprobs == 3
    assert client.taken(CHAT, top_logprobs=0).generation.output.logprobs is None
    client.refused(CHAT, top_logprobs=3)


def test_R57_response_formats(client: Client) -> None:
    def constraint(asked: Any) -> Constraint | None:
        return client.taken(CHAT, response_format=asked).generation.output.constraint

    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}}
    assert constraint({"type": "text"}) is None
    assert constraint({"type": "json_object"}) == Constraint("json_object")
    named = {"name": "f", "strict": True, "schema": schema}
    found = constraint({"type": "json_schema", "json_schema": named})
    assert found == Constraint("json_schema", json.dumps(schema))
    anything = {"type": "json_schema", "json_schema": {"name": "f", "schema": {}}}
    assert constraint(anything) == Constraint("json_schema", "{}")
    for kind in ("text", "json_object"):
        beside = {"type": kind, "json_schema": named}
        client.refused(CHAT, "response_format.json_schema", response_format=beside)
    for param, bad in {
        "response_format.type": {"type": "xml"},
        "response_format.json_schema": {"type": "json_schema"},
        "response_format.json_schema.name": {"type": "json_schema", "json_schema": {}},
        "response_format.json_schema.schema": {
            "type": "json_schema",
            "json_schema": {"name": "f", "schema": "x"},
        },
    }.items():
        client.refused(CHAT, param, response_format=bad)
    for missing in ({"name": "f"}, {"name": "f", "schema": None}):
        bad = {"type": "json_schema", "json_schema": missing}
        error = client.refused(CHAT, "response_format.json_schema.schema", response_format=bad)
        assert "the schema {}" in error["message"]
    for param, bad in {}.items():
        client.refused(CHAT, param, response_format=bad)
    forced = {"tools": [TOOL], "tool_choice": "required"}
    client.refused(CHAT, "tool_choice", response_format={"type": "json_object"}, **forced)


def test_R66_a_name_that_an_attacker_chose_is_not_repeated(client: Client) -> None:
    name = '<script>alert("x")</script>'
    tool = {**TOOL, name: 1}
    error = client.refused(CHAT, "tools[0].?", tools=[tool])
    assert name not in json.dumps(error)
    assert error["code"] == "unknown_parameter"
