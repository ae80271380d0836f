"""The OpenAPI document is right: what it allows is answered as it says, what it forbids is refused,
and nothing that can be sent is an error of the server's own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from schemathesis import GenerationMode
from schemathesis.checks import load_all_checks
from schemathesis.specs.openapi import checks

from mayfly_protocol.serving import Failed
from mayfly_server.api.anthropic.messages_answer import MessageEvent
from mayfly_server.api.openai.chat_answer import ChatEvent
from mayfly_server.api.openai.completions import TextEvent
from mayfly_server.api.openapi import REFERENCE
from mayfly_server.api.responses.responses_objects import ResponsesEvent
from mayfly_server.app import create_app
from mayfly_server.http.api_keys import from_environment
from mayfly_server.settings import FrontSettings
from support.doubles.fake_node import FakeNode, accept, finish, step
from support.running_front import RunningFront
from support.server import Server

MODEL = "tiny"
OPERATIONS = {
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "POST /v1/responses",
    "POST /v1/responses/input_tokens",
    "POST /v1/messages",
    "POST /v1/messages/count_tokens",
    "POST /tokenize",
    "POST /detokenize",
    "GET /v1/models",
    "GET /v1/models/{name}",
    "GET /mayfly/status",
    "GET /livez",
    "GET /readyz",
    "GET /health",
}

load_all_checks()
CHECKS = (
    schemathesis.checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.unsupported_method,
)


def script(submit: Any) -> Iterator[Any]:
    """Two tokens in every choice."""
    yield accept(submit)
    for choice in range(submit.generation.n):
        yield step(submit, 0, "a", choice)
        yield step(submit, 1, "b", choice, finish="stop")
    yield finish(submit, 2)


@pytest.fixture(scope="module")
def front() -> Iterator[RunningFront]:
    with FakeNode(MODEL) as node:
        node.worker(script)
        with RunningFront(node.control) as front:
            yield front


@pytest.fixture(scope="module")
def document(front: RunningFront) -> dict[str, Any]:
    found: dict[str, Any] = front.client.get("/openapi.json").json()
    return found


TOOL = {"name": "sum", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "tools": [{"type": "function", "function": TOOL}],
        "logprobs": True,
        "top_logprobs": 2,
        "stream_options": {"include_usage": True},
    },
    "/v1/completions": {"logprobs": 2, "max_tokens": 5, "n": 2},
    "/v1/responses": {
        "tools": [{"type": "function", **TOOL}],
        "include": ["message.output_text.logprobs"],
    },
    "/v1/messages": {
        "tools": [{"name": "sum", "input_schema": TOOL["parameters"]}],
        "max_tokens": 200,
    },
}


def valid_events(document: dict[str, Any], path: str, text: str) -> int:
    """The number of events of a stream, each of which is what the document says."""
    answer = document["paths"][path]["post"]["responses"]["200"]
    data = answer["content"]["text/event-stream"]["itemSchema"]["properties"]["data"]
    content = data["anyOf"][0]["contentSchema"] if "anyOf" in data else data["contentSchema"]
    valid = jsonschema.Draft202012Validator({**content, "components": document["components"]})
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line[:5] == "data:"]
    assert lines
    for line in lines:
        if line != "[DONE]":
            valid.validate(json.loads(line))
        else:
            assert "anyOf" in data
    return len(lines)


def without_nulls(value: Any) -> Any:
    """Removes nulls, as FastAPI does in its document."""
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return value


def operations(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        f"{method.upper()} {path}": operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }


def test_every_operation_is_documented(document: dict[str, Any]) -> None:
    found = operations(document)
    assert set(found) == OPERATIONS
    ids = [operation["operationId"] for operation in found.values()]
    assert len(set(ids)) == len(ids)
    for name, operation in found.items():
        assert operation["description"], name
        assert {"200", "4XX"} <= operation["responses"].keys()
        assert "422" not in operation["responses"]
        for response in operation["responses"].values():
            assert response["content"]["application/json"]["schema"], name


def test_every_schema_has_a_name_of_its_own(document: dict[str, Any]) -> None:
    """FastAPI makes up long ones where two classes have the same."""
    names = document["components"]["schemas"].keys()
    assert [name for name in names if not name.isalnum()] == []
    for event in (ChatEvent, TextEvent, MessageEvent, ResponsesEvent):
        made = TypeAdapter[Any](event).json_schema(ref_template=REFERENCE)
        for name, definition in made["$defs"].items():
            assert document["components"]["schemas"][name] == without_nulls(definition)


def test_every_schema_is_one(document: dict[str, Any]) -> None:
    for name, schema in document["components"]["schemas"].items():
        jsonschema.Draft202012Validator.check_schema(schema)
        untyped = [
            field
            for field, content in schema.get("properties", {}).items()
            if not {"type", "$ref", "anyOf", "oneOf", "const", "enum", "allOf"} & content.keys()
        ]
        assert set(untyped) <= {"cache_control", "guided_json", "effort"}, (name, untyped)


def test_examples_are_answered(front: RunningFront, document: dict[str, Any]) -> None:
    seen = 0
    for name, operation in operations(document).items():
        if "requestBody" not in operation:
            continue
        method, path = name.split()
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        body = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        assert body["examples"], name
        for example in body["examples"]:
            asked = {key: value for key, value in example.items() if key != "model"}
            response = front.client.request(method, path, json=asked)
            assert response.status_code == 200, (name, response.text)
            seen += 1
    assert seen >= 10


@pytest.mark.parametrize("path", STREAMS)
def test_examples_of_events_are_as_documented(document: dict[str, Any], path: str) -> None:
    answer = document["paths"][path]["post"]["responses"]["200"]
    assert valid_events(document, path, answer["content"]["text/event-stream"]["example"])


@pytest.mark.parametrize("said", ["[text]", "[thinks]", "[said and called]", "[two calls]"])
@pytest.mark.parametrize("path", STREAMS)
def test_events_are_as_documented(
    script: Server, document: dict[str, Any], path: str, said: str
) -> None:
    asked = {key: value for key, value in STREAMS[path].items() if key != "input"}
    messages = [{"role": "user", "content": said}]
    prompt = {"/v1/completions": {"prompt": said}, "/v1/responses": {"input": said}}
    body = {**asked, **prompt.get(path, {"messages": messages}), "stream": True}
    response = script.post(path, body)
    assert response.status_code == 200, response.text
    assert valid_events(document, path, response.text) > 3


@pytest.mark.parametrize("path", STREAMS)
def test_errors_in_the_middle_are_as_documented(document: dict[str, Any], path: str) -> None:
    def broken(submit: Any) -> Iterator[Any]:
        yield accept(submit)
        yield step(submit, 0, "a")
        yield Failed(submit.rid, submit.attempt, "grammar", "too many states")

    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
    prompt = {"/v1/completions": {"prompt": "a"}, "/v1/responses": {"input": "a"}}.get(path, prompt)
    with FakeNode(MODEL) as node:
        node.worker(broken)
        with RunningFront(node.control) as front:
            asked = {"max_tokens": 9} if path == "/v1/messages" else {}
            response = front.client.post(path, json={**asked, **prompt, "stream": True})
    assert valid_events(document, path, response.text) > 1
    assert "too many states" in response.text


def test_keys_are_documented(document: dict[str, Any]) -> None:
    """A key is documented as optional where the server has no keys, and as required where it has
    some."""
    assert document["components"]["securitySchemes"].keys() == {"bearer", "header"}
    assert document["security"] == [{"bearer": []}, {"header": []}, {}]
    assert document["paths"]["/livez"]["get"]["security"] == []
    keys = from_environment({"MAYFLY_API_KEYS": "some-key"})
    locked = create_app(FrontSettings(nodes=("ipc:///nowhere",)), keys).openapi()
    assert locked["security"] == [{"bearer": []}, {"header": []}]
    assert locked["paths"]["/livez"]["get"]["security"] == []


def test_bodies_may_have_other_fields_unless_fields_are_strict(document: dict[str, Any]) -> None:
    strict = create_app(FrontSettings(nodes=("ipc:///nowhere",), strict_fields=True)).openapi()
    for name, operation in operations(document).items():
        if "requestBody" in operation:
            schema = operation["requestBody"]["content"]["application/json"]["schema"]
            body = schema["$ref"].rpartition("/")[2]
            assert "additionalProperties" not in document["components"]["schemas"][body], name
            assert strict["components"]["schemas"][body]["additionalProperties"] is False


@pytest.fixture(scope="module")
def api(front: RunningFront) -> Any:
    return schemathesis.openapi.from_url(f"{front.url}/openapi.json")


MODES = {
    "as documented": GenerationMode.POSITIVE,
    "otherwise": GenerationMode.NEGATIVE,
}
BOUNDED = settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
LONG = settings(BOUNDED, max_examples=400, derandomize=False)


def fuzz(api: Any, document: dict[str, Any], name: str, how: str, bound: settings) -> None:
    method, path = name.split()
    cases = api[path][method].as_strategy(generation_mode=MODES[how])

    @bound
    @given(case=cases, served=st.booleans())
    def run(case: Any, served: bool) -> None:
        if served and isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = MODEL  # the others would all be 404
        response = case.call_and_validate(checks=CHECKS, timeout=20)
        if response.headers["content-type"][0].startswith("text/event-stream"):
            assert valid_events(document, path, response.text)

    run()


WITH_BODIES = [(name, how) for name in sorted(OPERATIONS) if "POST" in name for how in MODES]
WITHOUT = [(name, "as documented") for name in sorted(OPERATIONS) if "GET" in name]


@pytest.mark.parametrize(("name", "how"), WITH_BODIES + WITHOUT)
def test_nothing_surprises(api: Any, document: dict[str, Any], name: str, how: str) -> None:
    fuzz(api, document, name, how, BOUNDED)


@pytest.mark.long
@pytest.mark.parametrize(("name", "how"), WITH_BODIES)
def test_nothing_surprises_at_length(
    api: Any, document: dict[str, Any], name: str, how: str
) -> None:
    fuzz(api, document, name, how, LONG)
