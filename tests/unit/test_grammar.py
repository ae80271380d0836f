"""Guided output: every text that the masks allow is valid, and schemas that cannot be followed are
refused."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mayfly_protocol.requests import Constraint
from mayfly_worker.request_errors import GrammarFailed, InvalidInput
from support import vocabularies
from support.grammar import GRAMMARS, PLAIN, accepts, allowed, sample, schema
from support.schemas import COLOUR, SCHEMAS, array, integer, record


@pytest.mark.parametrize("name", SCHEMAS)
def test_R59_documents_of_a_bounded_schema_end_and_are_valid(name: str) -> None:
    compiled = schema(SCHEMAS[name])
    for seed in range(6):
        text = sample(compiled, seed)
        assert text is not None, "it did not end"
        jsonschema.validate(json.loads(text), SCHEMAS[name])


def test_the_corpus_is_large_enough() -> None:
    assert len(SCHEMAS) >= 40


def test_json_is_compact() -> None:
    assert accepts(schema(record(a=array(integer(0, 9), 2, 2))), '{"a":[1,2]}')
    assert not accepts(schema(record(a=array(integer(0, 9), 2, 2))), '{"a": [1,2]}')


@pytest.mark.parametrize("value", ["", '{"type": "object"}'])
def test_R57_json_object_is_any_object(value: str) -> None:
    compiled = GRAMMARS.compile(Constraint("json_object", value))
    assert accepts(compiled, '{"a":[1,{"b":null}],"c":"x"}')
    assert not accepts(compiled, "[1]")


@pytest.mark.parametrize(
    ("value", "place", "why"),
    [
        ({"type": "strin"}, "#", "strin"),
        (record(a=record(b={"type": "foo"})), "#/properties/a/properties/b", "foo"),
        (record(a=array(integer(5, 3), 1, 2)), "#/properties/a/items", "Unsatisfiable"),
        (
            record(a=COLOUR, b={"type": "string", "pattern": "("}),
            "#/properties/b",
            "unclosed group",
        ),
        ({"type": "array", "items": {"uniqueItems": True}}, "#/items", "uniqueItems"),
        ({"anyOf": [BOOLEAN := {"type": "boolean"}, {"not": BOOLEAN}]}, "#/anyOf/1", "not"),
        ({"$defs": {"x/y": {"enum": 3}}, "$ref": "#/$defs/x~1y"}, "#/$defs/x~1y", "enum"),
        (record(a={"$ref": "#/$defs/gone"}), "#/properties/a", "gone"),
        ({"type": "string", "format": "banana"}, "#", "banana"),
        ({"enum": []}, "#", "empty"),
        (record(a={"oneOf": [{"type": "number"}, integer(1, 2)]}), "#/properties/a", "use anyOf"),
        ({"type": "string", "minLength": 4, "maxLength": 2}, "#", "minLength"),
        ({"properties": [1]}, "#", "properties"),
    ],
)
def test_a_wrong_schema_is_refused_and_its_place_named(value: Any, place: str, why: str) -> None:
    with pytest.raises(InvalidInput) as error:
        schema(value)
    assert f" {place}: " in error.value.message
    assert why in error.value.message
    assert "<state>" not in error.value.message
    assert error.value.param == "response_format"


CLOSED = {"type": "object", "properties": {"a": COLOUR}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({**CLOSED, "not": {"required": ["b"]}}, "#"),
        (record(a={**CLOSED, "not": {"required": ["b"]}}), "#/properties/a"),
        ({"type": "array", "items": False, "uniqueItems": True}, "#"),
        ({"anyOf": [True, False, {"not": True}]}, "#/anyOf/2"),
        ({"$defs": {"x": False, "y": True}, "not": {"$ref": "#/$defs/x"}}, "#"),
        (record(["a"], a=False), "#/properties/a"),
        ({"type": "array", "items": 5}, "#"),
        ({"type": "array", "prefixItems": [None]}, "#"),
    ],
)
def test_N11_a_fault_is_found_beside_parts_that_are_no_objects(value: Any, place: str) -> None:
    with pytest.raises(InvalidInput, match=f" {re.escape(place)}(/|: )"):
        schema(value)


def test_an_optional_member_that_cannot_be_is_only_never_there() -> None:
    impossible = {"type": "integer", "minimum": 5, "maximum": 3}
    assert sample(schema(record([], a=impossible)), 0) == "{}"
    with pytest.raises(InvalidInput, match="#/properties/b: "):
        schema(record(["b"], a=impossible, b=impossible))


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (record(child={"$ref": "#"}), "#"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "#"),
        (
            {"$ref": "#/$defs/n", "$defs": {"n": record(next={"$ref": "#/$defs/n"})}},
            "#/$defs/n",
        ),
        (
            {
                "$ref": "#/$defs/a",
                "$defs": {
                    "a": record(b={"$ref": "#/$defs/b"}),
                    "b": {"anyOf": [record(a={"$ref": "#/$defs/a"}), {"$ref": "#/$defs/a"}]},
                },
            },
            "#/$defs/a",
        ),
    ],
)
def test_a_schema_without_finite_documents_is_refused(value: Any, place: str) -> None:
    with pytest.raises(InvalidInput, match=f"{re.escape(place)} requires itself"):
        schema(value)


@pytest.mark.parametrize(
    "value",
    [
        record([], child={"$ref": "#"}),
        array({"$ref": "#"}, 0, 2),
        record(child={"anyOf": [{"type": "null"}, {"$ref": "#"}]}),
        {"$defs": {"unused": record(a={"$ref": "#/$defs/unused"})}, "type": "boolean"},
    ],
)
def test_recursion_that_can_end_is_fine(value: Any) -> None:
    text = sample(schema(value), 1)
    assert text is not None
    jsonschema.validate(json.loads(text), value)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("{", "not JSON"),
        ("[1]", "JSON object"),
        ("true", "JSON object"),
        ('{"items":' * 200 + "{}" + "}" * 200, "recursion"),
        ('{"items":' * 20_000 + "{}" + "}" * 20_000, "not JSON"),
        (json.dumps({"properties": {f"p{n}": {} for n in range(2_001)}}), "2001 properties"),
        (json.dumps({"description": "x" * 250_000}), "250000"),
    ],
)
def test_texts_that_are_no_schema_or_too_much_of_one_are_refused(value: str, why: str) -> None:
    with pytest.raises(InvalidInput, match=why) as error:
        GRAMMARS.compile(Constraint("json_schema", value))
    assert error.value.param == "response_format"


def test_a_schema_cannot_loosen_the_rules() -> None:
    lenient = {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}
    with pytest.raises(InvalidInput, match="uniqueItems"):
        schema(lenient)
    spaced = record(a=COLOUR) | {"x-guidance": {"whitespace_flexible": True}}
    assert not accepts(schema(spaced), '{ "a":"red"}')


# The other kinds


def test_regular_expressions_match_the_whole() -> None:
    compiled = GRAMMARS.compile(Constraint("regex", r"^\d{3}/[a-z]+$"))
    assert accepts(compiled, "123/abc")
    assert not accepts(compiled, "x123/abc")
    text = sample(compiled, 3)
    assert text is not None
    assert re.fullmatch(r"[0-9]{3}/[a-z]+", text)


@settings(deadline=None)
@given(st.lists(st.text(max_size=6), min_size=1, max_size=4), st.integers(0, 99))
def test_choices_are_taken_literally(choices: list[str], seed: int) -> None:
    compiled = GRAMMARS.compile(Constraint("choice", json.dumps(choices)))
    assert sample(compiled, seed) in choices


def test_lark_and_gbnf() -> None:
    lark = GRAMMARS.compile(Constraint("grammar", 'start: "a" NUMBER\nNUMBER: /[0-9]{1,3}/'))
    gbnf = GRAMMARS.compile(Constraint("grammar", 'root ::= "a" number\nnumber ::= [0-9]+'))
    for compiled in (lark, gbnf):
        assert accepts(compiled, "a12")
        assert not accepts(compiled, "b12")


@pytest.mark.parametrize(
    ("kind", "value", "why"),
    [
        ("regex", "(a", "unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", r"[^\x00-\x{10FFFF}]", "nothing can ever match"),
        ("choice", "[]", "list of strings"),
        ("choice", "[1]", "list of strings"),
        ("choice", "{", "not JSON"),
        ("grammar", "start: nowhere", "nowhere"),
        ("grammar", 'root ::= ("a"', "neither Lark nor GBNF"),
        ("grammar", "", "neither Lark nor GBNF"),
    ],
)
def test_what_is_no_grammar_is_refused(kind: Any, value: str, why: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(why)) as error:
        GRAMMARS.compile(Constraint(kind, value, "the_field"))
    assert error.value.param == "the_field"


@pytest.mark.parametrize(
    "value", ["(a{1000}){1000}", "(a?){1000}a{1000}", "((x{40}){40}){400}", "(a{1,9}){900}a{900}"]
)
@pytest.mark.parametrize("kind", ["regex", "grammar", "json_schema"])
def test_what_needs_too_many_states_is_refused_soon(kind: Any, value: str) -> None:
    written = {
        "regex": value,
        "grammar": f"start: /{value}/",
        "json_schema": json.dumps(record(b={"type": "string", "pattern": f"^{value}$"})),
    }
    before = time.monotonic()
    with pytest.raises(InvalidInput, match="too many states") as error:
        GRAMMARS.compile(Constraint(kind, written[kind]))
    assert time.monotonic() - before < 20
    if kind == "json_schema":
        assert "at #/properties/b" in error.value.message


def test_what_shows_later_that_it_needs_too_many_states_fails_its_row() -> None:
    matcher = GRAMMARS.compile(Constraint("regex", "[0-9]{20}(a?){1000}a{1000}")).matcher()
    with pytest.raises(GrammarFailed, match="too many states"):
        for id in vocabularies.in_pieces("01234567890123456789aa", PLAIN):
            allowed(matcher)
            matcher.consume(id)
