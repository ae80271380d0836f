"""Answers that have to follow a schema. docs/reported-faults.md lists the ids in test names."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from support.api_client import (
    CHAT,
    PATHS,
    Json,
    answer,
    choice,
    post,
    refused,
    stream,
    tokenizer_of,
    user,
    whole_stream,
)
from support.server import Server

OK = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
POINT = {
    "type": "object",
    "properties": {"alpha": {"type": "integer", "minimum": -99, "maximum": 99}, "beta": OK},
    "required": ["alpha", "beta"],
    "additionalProperties": False,
}
THREE = {"type": "array", "items": POINT, "minItems": 3, "maxItems": 3}


def following(schema: Json, **fields: Any) -> Json:
    format = {"type": "json_schema", "json_schema": {"name": "f", "strict": True, "schema": schema}}
    return {"response_format": format, "max_tokens": 300, **fields}


def valid(text: str, schema: Json) -> Any:
    value = json.loads(text)
    Draft202012Validator(schema).validate(value)
    return value


@pytest.mark.parametrize("seed", range(3))
def test_R57_random_weights_follow_a_schema(tiny: Server, seed: int) -> None:
    asked = following(OK, messages=[user("tell me a fact")], temperature=1.5, seed=seed)
    found = choice(tiny, CHAT, **asked)
    valid(found["text"], OK)
    assert found["finish_reason"] == "stop"
    streamed = whole_stream(tiny, CHAT, **asked)
    assert (streamed.text(), streamed.finish()) == (found["text"], "stop")


def test_R57_json_object(tiny: Server) -> None:
    """Any object. Random weights would go on for ever, so that they are pushed to close it."""
    closing = {str(tokenizer_of(tiny).encode(mark).ids[0]): 20 for mark in '"}'}
    for seed in range(5):
        found = choice(
            tiny,
            CHAT,
            response_format={"type": "json_object"},
            temperature=1.5,
            seed=seed,
            logit_bias=closing,
            max_tokens=200,
        )
        assert isinstance(json.loads(found["text"]), dict)
        assert found["finish_reason"] == "stop"
    cut = choice(tiny, CHAT, response_format={"type": "json_object"}, max_tokens=8)
    assert cut["text"].startswith("{")
    assert cut["finish_reason"] == "length"


def test_R57_plain_text_is_a_format_too(tiny: Server) -> None:
    plain = choice(tiny, CHAT)
    assert choice(tiny, CHAT, response_format={"type": "text"}) == plain


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": OK},
        {"guided_json": json.dumps(OK)},
        {"guided_choice": ['{"ok":true}', '{"ok":false}']},
        {"guided_regex": r'\{"ok":(true|false)\}'},
        {"guided_grammar": 'start: "{" "\\"ok\\"" ":" ("true" | "false") "}"'},
    ],
    ids=lambda fields: str(next(iter(fields))),
)
def test_R57_other_ways_to_say_it(tiny: Server, path: str, fields: Json) -> None:
    found = choice(tiny, path, **fields, temperature=1.5, seed=1, max_tokens=60)
    valid(found["text"], OK)
    assert found["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "objekt"}, "objekt"),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}}, "none"),
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}, "/a"),
        ({"$ref": "#"}, "#"),
        ({"enum": []}, "#"),
    ],
)
def test_R57_schemas_that_cannot_be_followed(tiny: Server, schema: Json, place: str) -> None:
    for streamed in (False, True):
        error = refused(post(tiny, CHAT, **following(schema), stream=streamed), "response_format")
        assert place in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": {"type": "objekt"}},
        {"guided_regex": "("},
        {"guided_regex": "(a{1000}){1000}"},
        {"guided_choice": ["a", "b" * 300_000]},
        {"guided_grammar": "start: nowhere"},
    ],
    ids=lambda fields: str(next(iter(fields))),
)
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_R57_an_error_names_the_field_that_asks_for_it(
    tiny: Server, path: str, streamed: bool, fields: Json
) -> None:
    [param] = fields
    refused(post(tiny, path, **fields, stream=streamed), param)


@pytest.mark.parametrize("path", PATHS)
def test_R57_what_shows_late_that_it_cannot_be_followed(tiny: Server, path: str) -> None:
    """The expression needs too many states, but not before its twentieth character."""
    asked = {"guided_regex": "[0-9]{20}(a?){1000}a{1000}", "max_tokens": 60}
    error = refused(post(tiny, path, **asked), "guided_regex")
    assert error["code"] == "format_too_complex"
    assert "too many states" in error["message"]
    streamed = stream(tiny, path, **asked)
    assert streamed.errors == [error]
    assert not streamed.done
    assert post(tiny, path).status_code == 200


@pytest.mark.parametrize(
    ("format", "param"),
    [
        ({"type": "yaml"}, "response_format.type"),
        ({"type": None}, "response_format.type"),
        ("json_object", "response_format"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {}}, "response_format.json_schema.name"),
    ],
)
def test_R57_formats_that_are_none(tiny: Server, format: Any, param: str) -> None:
    refused(post(tiny, CHAT, response_format=format), param)


def test_B05_a_schema_without_constraints_allows_any_value(tiny: Server) -> None:
    kinds = set()
    for seed in range(20):
        fields = following({}, temperature=2, seed=seed, max_tokens=40)
        found = choice(tiny, CHAT, messages=[user("x")], **fields)
        if found["finish_reason"] == "stop":
            kinds.add(type(json.loads(found["text"])))
    assert kinds - {dict}


def test_R59_every_answer_that_ends_is_valid(tiny: Server) -> None:
    for seed in range(20):
        found = choice(tiny, CHAT, **following(THREE, temperature=1.5, seed=seed))
        assert found["finish_reason"] == "stop"
        for point in valid(found["text"], THREE):
            assert list(point) == ["alpha", "beta"]


def test_R59_choices_of_one_request_follow_it_each(tiny: Server) -> None:
    found = answer(tiny, CHAT, **following(THREE, temperature=1.5, seed=1, n=8))
    texts = {one["message"]["content"] for one in found["choices"]}
    assert len(texts) > 1
    for text in texts:
        valid(text, THREE)


def test_R59_an_answer_that_is_cut_off_says_so(tiny: Server) -> None:
    whole = choice(tiny, CHAT, **following(THREE))
    cut = choice(tiny, CHAT, **following(THREE, max_tokens=7))
    assert cut["finish_reason"] == "length"
    assert whole["text"].startswith(cut["text"])
