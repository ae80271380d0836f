"""The OpenAPI document is right: what it allows is answered as it says, what it forbids is refused,
and nothing that can be sent is an error of the server's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import load_all_checks
from schemathesis.specs.openapi import checks

from models.fake_engine import FakeNode, accept, finish, step
from models.running_front import RunningFront

MODEL = "tiny"
OPERATIONS = {
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "POST /v1/responses",
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


def test_keys_are_documented(document: dict[str, Any]) -> None:
    assert document["components"]["securitySchemes"].keys() == {"bearer", "header"}
    assert document["paths"]["/livez"]["get"]["security"] == []


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
LONG = settings(BOUNDED, max_examples=2000, derandomize=False)


def fuzz(api: Any, name: str, how: str, bound: settings) -> None:
    method, path = name.split()
    cases = api[path][method].as_strategy(generation_mode=MODES[how])

    @bound
    @given(case=cases, served=st.booleans())
    def run(case: Any, served: bool) -> None:
        if served and isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = MODEL  # the others would all be 404
        case.call_and_validate(checks=CHECKS, timeout=20)

    run()


every_operation = pytest.mark.parametrize(
    ("name", "how"),
    [
        (name, how)
        for name in sorted(OPERATIONS)
        for how in MODES
        if name.startswith("POST") or how == "as documented"  # a GET has nothing to get wrong
    ],
)


@every_operation
def test_nothing_surprises(api: Any, name: str, how: str) -> None:
    fuzz(api, name, how, BOUNDED)


@pytest.mark.long
@every_operation
def test_nothing_surprises_at_length(api: Any, name: str, how: str) -> None:
    fuzz(api, name, how, LONG)
