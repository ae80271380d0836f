"""Request parsers on any input: each makes a prompt of it or says what is wrong."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from mayfly_server.api import request_fields
from mayfly_server.api.anthropic import messages_prompt as anthropic
from mayfly_server.api.anthropic.messages_request import CountTokensRequest, MessagesRequest
from mayfly_server.api.openai import chat, chat_prompt, common_request, tokenize
from mayfly_server.api.openai.chat_request import ChatRequest
from mayfly_server.api.openai.completions import CompletionRequest
from mayfly_server.api.openai.tokenize import DetokenizeRequest, TokenizeRequest
from mayfly_server.api.responses import responses_prompt as responses
from mayfly_server.api.responses.responses_request import ResponsesRequest
from mayfly_server.errors import InvalidRequest
from mayfly_server.http import api_keys
from mayfly_server.http.api_keys import KeysError
from mayfly_server.http.body import parse_object
from mayfly_server.http.errors import validation_error
from mayfly_server.http.hosts import host_name

EXAMPLES = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def _chat(request: ChatRequest) -> None:
    chat_prompt.chat_prompt(request)
    request_fields.sampling(request)
    formatted = common_request.constraint(request, chat.response_format(request)) is not None
    common_request.usage_report(request)
    common_request.ending(request, request.max_tokens, formatted=formatted)


def _completion(request: CompletionRequest) -> None:
    request_fields.sampling(request)
    common_request.constraint(request)


def _nothing(request: BaseModel) -> None:
    pass


Parser = tuple[type[BaseModel], Callable[[Any], Any], list[dict[str, Any]]]
PARSERS: dict[str, Parser] = {
    "chat": (
        ChatRequest,
        _chat,
        [
            {
                "model": "m",
                "messages": [
                    {"role": "system", "content": "s"},
                    {"role": "user", "content": [{"type": "text", "text": "a"}]},
                    {"role": "assistant", "content": None, "tool_calls": [CALL]},
                    {"role": "tool", "content": "x", "tool_call_id": "c"},
                ],
                "tools": [TOOL],
                "tool_choice": {"type": "function", "function": {"name": "f"}},
                "temperature": 0.5,
                "stop": ["a"],
                "logit_bias": {"5": 1.0},
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            },
            {
                "messages": [{"role": "user", "content": "a"}],
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"type": "object"}},
                },
                "guided_json": "{}",
            },
        ],
    ),
    "completions": (
        CompletionRequest,
        _completion,
        [
            {"prompt": ["a", "b"], "n": 2, "max_tokens": 5, "logprobs": 3, "seed": 1},
            {"prompt": [[1, 2], [3]], "guided_choice": ["a"]},
        ],
    ),
    "responses": (
        ResponsesRequest,
        responses.read_prompt,
        [
            {
                "instructions": "s",
                "input": [
                    {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "t"}]},
                    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "c", "output": "x"},
                ],
                "tools": [{"type": "function", "name": "f"}],
                "tool_choice": {"type": "function", "name": "f"},
                "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
                "reasoning": {"effort": "low"},
            },
            {"input": "a", "store": False},
        ],
    ),
    "messages": (
        MessagesRequest,
        anthropic.chat_prompt,
        [
            {
                "max_tokens": 5,
                "system": [{"type": "text", "text": "s"}],
                "messages": [
                    {"role": "user", "content": "a"},
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "thinking", "thinking": "t"},
                            {"type": "tool_use", "id": "c", "name": "f", "input": {}},
                        ],
                    },
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "c", "content": "x"}],
                    },
                ],
                "tools": [{"name": "f", "input_schema": {}}],
                "tool_choice": {"type": "tool", "name": "f"},
                "thinking": {"type": "enabled", "budget_tokens": 1024},
            },
            {
                "max_tokens": 5,
                "system": "x-anthropic-billing-header: a",
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": "c",
                                "content": [
                                    {"type": "image", "source": {}},
                                    {"type": "document", "source": {"type": "text", "data": "a"}},
                                    {"type": "tool_reference", "tool_name": "g"},
                                ],
                            }
                        ],
                    },
                    {
                        "role": "system",
                        "clear_at": "never",
                        "content": [
                            {
                                "type": "tool_addition",
                                "tool": {"type": "tool_reference", "name": "g"},
                            }
                        ],
                    },
                ],
                "tools": [
                    {"name": "f", "input_schema": {}, "allowed_callers": ["direct"]},
                    {"name": "g", "input_schema": {}, "defer_loading": True},
                    {"type": "web_search_20250305", "name": "web"},
                ],
                "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
                "container": {"id": None},
                "thread": None,
            },
        ],
    ),
    "count_tokens": (
        CountTokensRequest,
        anthropic.chat_prompt,
        [{"messages": [{"role": "user", "content": "a"}]}],
    ),
    "tokenize": (
        TokenizeRequest,
        tokenize.asked_prompt,
        [{"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}], "tools": [TOOL]}],
    ),
    "detokenize": (DetokenizeRequest, _nothing, [{"tokens": [1, 2]}]),
}

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6)
    | st.sampled_from(
        ["text", "user", "assistant", "function", "auto", "tool_use", "", "{", "null"]
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.text(max_size=4) | st.sampled_from(["type", "text", "role", "content", "name"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)


def places(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place inside a JSON value."""
    inside: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        inside = list(value.items())
    elif isinstance(value, list):
        inside = list(enumerate(value))
    return [here, *(place for key, item in inside for place in places(item, (*here, key)))]


def changed(body: dict[str, Any], place: tuple[Any, ...], new: Any, how: str) -> Any:
    """The body with something else at one place, something more, or nothing."""
    if not place:
        return new
    body = copy.deepcopy(body)
    parent: Any = body
    for key in place[:-1]:
        parent = parent[key]
    if how == "drop":
        del parent[place[-1]]
    elif how == "add" and isinstance(parent, dict):
        parent["more" if not isinstance(new, str) or not new else new] = new
    else:
        parent[place[-1]] = new
    return body


def read(body: Any, parser: Parser) -> None:
    """Parses a body as a route does. Only InvalidRequest may be raised, and its text can be
    sent."""
    model, go_on, _ = parser
    try:
        parsed = parse_object(json.dumps(body).encode())
        try:
            request = model.model_validate(parsed)
        except ValidationError as error:
            found = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
            raise validation_error(found, parsed) from error
        go_on(request)
    except InvalidRequest as refused:
        json.dumps(refused.envelope()).encode()
        assert len(refused.message) < 2000


@pytest.mark.parametrize("name", PARSERS)
class TestRequests:
    def test_examples_are_read(self, name: str) -> None:
        model, go_on, examples = PARSERS[name]
        for example in examples:
            request = model.model_validate(parse_object(json.dumps(example).encode()))
            try:
                go_on(request)
            except InvalidRequest as refused:
                assert "exclude each other" in refused.message

    def test_anything(self, name: str) -> None:
        @EXAMPLES
        @given(JSON)
        def run(body: Any) -> None:
            read(body, PARSERS[name])

        run()

    def test_almost_a_request(self, name: str) -> None:
        examples = PARSERS[name][2]

        @EXAMPLES
        @given(st.data())
        def run(data: st.DataObject) -> None:
            body: Any = data.draw(st.sampled_from(examples))
            for _ in range(data.draw(st.integers(1, 3))):
                if not isinstance(body, dict):
                    break
                place = data.draw(st.sampled_from(places(body)))
                how = data.draw(st.sampled_from(["replace", "add", "drop"]))
                body = changed(body, place, data.draw(JSON), how)
            read(body, PARSERS[name])

        run()


@EXAMPLES
@given(st.binary(max_size=100) | st.text(max_size=100).map(str.encode))
def test_bodies(raw: bytes) -> None:
    try:
        assert isinstance(parse_object(raw), dict)
    except InvalidRequest as refused:
        assert refused.code == "invalid_json"


@EXAMPLES
@given(st.text(max_size=60) | st.from_regex(r"\[?[0-9a-zA-Z:.\[\]%-]{0,40}\]?(:[0-9]*)?"))
def test_hosts(text: str) -> None:
    found = host_name(text)
    assert found is None or (found == found.lower() and " " not in found)


@EXAMPLES
@given(
    st.text(max_size=100)
    | st.lists(
        st.sampled_from(["[[keys]]", 'name = "a"', f'sha256 = "{"0" * 64}"', "admin = true", "x"]),
        max_size=6,
    ).map("\n".join)
)
def test_keys_files(text: str) -> None:
    try:
        assert all(len(key.digest) == 32 for key in api_keys.parse_keys_file(text))
    except KeysError as error:
        assert str(error)
