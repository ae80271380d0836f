"""Fields that no API knows: taken if they ask for nothing, otherwise named or refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from mayfly_protocol.requests import ChatPrompt
from mayfly_server.http.ignored_fields import LOG_INTERVAL_S, MAX_LOGGED, IgnoredFieldsLog
from support.doubles.fake_node import FakeNode
from support.fake_clock import FakeClock
from support.front_client import CHAT, TEXT, TOOL, USER, Client
from support.running_front import RunningFront

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
TOOL_OF_MESSAGES = {"name": "sum", "input_schema": {"type": "object"}}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER], "tools": [TOOL]},
    TEXT: {"prompt": "hi", "stream_options": {}, "stream": True},
    RESPONSES: {"input": "hi", "tools": [{"type": "function", "name": "sum"}]},
    MESSAGES: {"max_tokens": 9, "messages": [USER], "tools": [TOOL_OF_MESSAGES]},
}
every_api = pytest.mark.parametrize("path", BODIES)
HEADER = "mayfly-ignored"
UNKNOWN = {"trust_remote_code": True, "best": 1}


@pytest.fixture(scope="module")
def strict(node: FakeNode) -> Iterator[RunningFront]:
    with RunningFront(node.control, strict_fields=True) as front:
        yield front


def post(front: RunningFront, path: str, **fields: Any) -> httpx.Response:
    return front.client.post(path, json=BODIES[path] | fields)


def code(response: httpx.Response) -> str:
    error = response.json()["error"]
    found: str = error.get("code") or error["details"]["error_code"]
    return found


@every_api
@pytest.mark.parametrize("stream", [False, True])
def test_N02_an_unknown_field_is_ignored_and_named(
    front: RunningFront, path: str, stream: bool
) -> None:
    streamed = {"stream": stream} if path != TEXT else {}
    response = post(front, path, **UNKNOWN, **streamed)
    assert response.status_code == 200, response.text
    assert response.headers[HEADER] == "trust_remote_code, best"
    assert HEADER not in post(front, path).headers


@every_api
def test_N02_an_error_names_the_ignored_fields_too(front: RunningFront, path: str) -> None:
    for wrong in ({"model": "nobody's"}, {"temperature": "hot"}):
        response = post(front, path, best=1, **wrong)
        assert response.status_code in (400, 404)
        assert response.headers[HEADER] == "best"


@every_api
@pytest.mark.parametrize("nothing", [None, "", [], {}])
def test_N07_fields_that_ask_for_nothing_are_taken(
    front: RunningFront, strict: RunningFront, path: str, nothing: Any
) -> None:
    for server in (front, strict):
        response = post(server, path, nobody_knows_it=nothing, copilot_cache_control={"a": 1})
        assert response.status_code == 200, response.text
        assert HEADER not in response.headers


@every_api
def test_strict_fields_refuses_unknown_ones(strict: RunningFront, path: str) -> None:
    response = post(strict, path, best=1)
    assert response.status_code == 400
    assert code(response) == "unknown_parameter"
    assert "best" in response.json()["error"]["message"]
    assert HEADER not in response.headers


OF_OTHER_APIS: dict[str, dict[str, Any]] = {
    CHAT: {
        **dict.fromkeys(("previous_response_id", "conversation", "suffix"), "x"),
        "documents": [{"text": "x"}],
        "best_of": 2,
    },
    TEXT: {
        **dict.fromkeys(("system", "instructions", "input"), "x"),
        **dict.fromkeys(("max_completion_tokens", "max_output_tokens", "max_new_tokens"), 3),
        "messages": [USER],
        "tools": [TOOL],
        "tool_choice": "required",
        "response_format": {"type": "json_object"},
        "stop_sequences": ["x"],
        "top_logprobs": 1,
    },
    RESPONSES: {
        **dict.fromkeys(("max_tokens", "max_completion_tokens", "n_predict"), 3),
        "messages": [USER],
        "system": "x",
        "response_format": {"type": "json_object"},
        "guided_json": {"type": "object"},
        "stop": "x",
        "stop_sequences": ["x"],
        "enable_thinking": False,
        "logprobs": True,
        "min_tokens": 5,
        "n": 2,
    },
    MESSAGES: {
        **dict.fromkeys(("max_completion_tokens", "max_output_tokens", "n_predict"), 3),
        **dict.fromkeys(("input", "prompt", "instructions", "previous_response_id"), "x"),
        "response_format": {"type": "json_object"},
        "guided_choice": ["a"],
        "stop": ["x"],
        "parallel_tool_calls": False,
        "enable_thinking": False,
        "logprobs": True,
        "n": 2,
    },
}
DEFAULTS: dict[str, Any] = {
    "n": 1,
    "best_of": 1,
    "logprobs": None,
    "tool_choice": None,
    "response_format": {"type": "text"},
    "function_call": "none",
    "min_tokens": 0,
    "stop": [],
}


@pytest.mark.parametrize(
    ("path", "field"), [(path, field) for path, asked in OF_OTHER_APIS.items() for field in asked]
)
def test_N02_a_field_of_another_api_that_would_change_the_answer_is_refused(
    front: RunningFront, path: str, field: str
) -> None:
    for value in (OF_OTHER_APIS[path][field], None):
        response = post(front, path, **{field: value})
        if value is None:
            assert response.status_code == 200, response.text
        else:
            assert (response.status_code, code(response)) == (400, "unsupported_parameter")
            assert response.json()["error"]["message"].startswith(f"{field}: ")
        assert HEADER not in response.headers


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (CHAT, {"reasoning_effort": "", "verbosity": "", "reasoning": {"effort": ""}}),
        (RESPONSES, {"reasoning": {"effort": "", "summary": ""}, "truncation": ""}),
        (RESPONSES, {"text": {"verbosity": ""}}),
    ],
)
def test_N07_an_empty_text_is_no_choice(
    front: RunningFront, node: FakeNode, path: str, asked: dict[str, Any]
) -> None:
    response = post(front, path, **asked)
    assert response.status_code == 200, response.text
    prompt = node.workers[0].submits[-1].generation.prompt
    assert isinstance(prompt, ChatPrompt) and prompt.template_kwargs == {}


@every_api
def test_N07_defaults_of_fields_of_other_apis_are_taken(front: RunningFront, path: str) -> None:
    defaults = DEFAULTS | ({"function_call": None} if path == CHAT else {})
    response = post(front, path, **defaults)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_N02_every_api_takes_the_same_sampling_fields(
    front: RunningFront, node: FakeNode, path: str
) -> None:
    asked = {"seed": 5, "min_p": 0.25, "top_k": 3, "presence_penalty": 1, "logit_bias": {"7": 2}}
    response = post(front, path, **asked)
    assert (response.status_code, HEADER in response.headers) == (200, False)
    found = node.workers[0].submits[-1].generation.sampling
    assert (found.seed, found.min_p, found.top_k, found.presence_penalty) == (5, 0.25, 3, 1)
    assert found.logit_bias == ((7, 2),)


@pytest.mark.parametrize("path", [path for path in BODIES if "tools" in BODIES[path]])
def test_N08_hints_are_taken_within_objects_and_nothing_else(
    front: RunningFront, path: str
) -> None:
    [tool] = BODIES[path]["tools"]
    idle = {"copilot_cache_control": {"type": "ephemeral"}, "nobody_knows_it": []}
    assert post(front, path, tools=[tool | idle]).status_code == 200
    response = post(front, path, tools=[tool | {"nobody_knows_it": 0}])
    assert code(response) == "unknown_parameter"
    place = "tools.0.nobody_knows_it" if path == "/v1/messages" else "tools[0].nobody_knows_it"
    assert place in response.json()["error"]["message"]


def test_R66_names_in_the_header_are_safe_and_bounded(front: RunningFront) -> None:
    evil = {"a\nset-cookie: x": 1, "<script>": 1, "x" * 65: 1}
    assert post(front, CHAT, **evil).headers[HEADER] == "?"
    many = post(front, CHAT, **{f"field{i}": 1 for i in range(100)}).headers[HEADER]
    assert many.startswith("field0, field1, ") and many.endswith(", field15, ...")


def test_a_count_of_tokens_names_them_too(client: Client) -> None:
    response = client.http.post("/tokenize", json={"prompt": "hi", "best": 1})
    assert response.headers[HEADER] == "best"


def test_pages_of_other_origins_may_read_the_header(node: FakeNode) -> None:
    origin = "https://app.example.com"
    with RunningFront(node.control, cors_origins=(origin,)) as front:
        asked = {"content": json.dumps(BODIES[CHAT] | {"best": 1}), "headers": {"origin": origin}}
        response = front.client.post(CHAT, **asked)
    assert response.headers[HEADER] == "best"
    assert HEADER in response.headers["access-control-expose-headers"]


def test_an_ignored_field_is_logged_once_a_day() -> None:
    clock = FakeClock()
    log = IgnoredFieldsLog(clock)
    with capture_logs() as lines:
        for _ in range(3):
            log.note("best")
        log.note("other")
        clock.now += LOG_INTERVAL_S
        log.note("best")
    assert [line["field"] for line in lines] == ["best", "other", "best"]
    assert {line["log_level"] for line in lines} == {"warning"}


def test_the_log_remembers_a_bounded_number_of_names() -> None:
    clock = FakeClock()
    log = IgnoredFieldsLog(clock)
    with capture_logs() as lines:
        for number in range(2 * MAX_LOGGED):
            log.note(f"field{number}")
        clock.now += LOG_INTERVAL_S
        log.note("best")
    assert len(lines) == MAX_LOGGED + 1
