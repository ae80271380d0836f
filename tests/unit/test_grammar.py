"""Guided output: whatever is drawn under the masks is right, and what cannot be is refused."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vocabularies
from mayfly_protocol.requests import ChatPrompt, Constraint
from mayfly_worker.errors import GrammarFailed, InvalidRequest
from mayfly_worker.grammar import Compiled, Grammars, Matcher
from mayfly_worker.text.markers import guided_markers
from mayfly_worker.text.parts import Parts
from mayfly_worker.text.toolcalls import Tools
from schemas import COLOUR, SCHEMAS, array, integer, record

PLAIN = vocabularies.byte_level("plain")
THINKING = vocabularies.byte_level("thinking")
END = 2
WIDTH = 2000
GRAMMARS = Grammars(PLAIN, WIDTH)


def allowed(matcher: Matcher, width: int = WIDTH) -> list[int]:
    """The ids that may come next."""
    mask = np.zeros((width + 31) // 32, dtype=np.int32)
    matcher.fill(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return [int(id) for id in np.flatnonzero(bits)]


def sample(
    compiled: Compiled, seed: int, tokenizer: Any = PLAIN, longest: int = 1500
) -> str | None:
    """Text drawn uniformly under the masks, or None if it had not ended by then."""
    rng = np.random.default_rng(seed)
    matcher, ids = compiled.matcher(), []
    for _ in range(longest):
        id = int(rng.choice(allowed(matcher)))
        if id == END:
            return str(tokenizer.decode(ids))
        matcher.consume(id)
        ids.append(id)
    return None


def accepts(compiled: Compiled, text: str, tokenizer: Any = PLAIN) -> bool:
    """Whether exactly this text can be written and then ended."""
    matcher = compiled.matcher()
    for id in vocabularies.ids_of(text, tokenizer):
        if id not in allowed(matcher):
            return False
        matcher.consume(id)
    return END in allowed(matcher)


def schema(value: Any, **options: Any) -> Compiled:
    return GRAMMARS.compile(Constraint("json_schema", json.dumps(value)), **options)


# Schemas


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
    with pytest.raises(InvalidRequest) as error:
        schema(value)
    assert f" {place}: " in error.value.message
    assert why in error.value.message
    assert "<state>" not in error.value.message
    assert error.value.param == "response_format"


def test_an_optional_member_that_cannot_be_is_only_never_there() -> None:
    impossible = {"type": "integer", "minimum": 5, "maximum": 3}
    assert sample(schema(record([], a=impossible)), 0) == "{}"
    with pytest.raises(InvalidRequest, match="#/properties/b: "):
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
    with pytest.raises(InvalidRequest, match=f"{re.escape(place)} requires itself"):
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
    with pytest.raises(InvalidRequest, match=why) as error:
        GRAMMARS.compile(Constraint("json_schema", value))
    assert error.value.param == "response_format"


def test_a_schema_cannot_loosen_the_rules() -> None:
    lenient = {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}
    with pytest.raises(InvalidRequest, match="uniqueItems"):
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
    with pytest.raises(InvalidRequest, match=re.escape(why)) as error:
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
    with pytest.raises(InvalidRequest, match="too many states") as error:
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


# Matchers


def test_ends_are_allowed_exactly_where_the_output_is_complete() -> None:
    matcher = GRAMMARS.compile(Constraint("regex", "ab?c?")).matcher()
    seen = []
    for id in vocabularies.in_pieces("abc", PLAIN):
        seen.append((END in allowed(matcher), matcher.finished))
        matcher.consume(id)
    assert seen == [(False, False), (True, False), (True, False)]
    assert allowed(matcher) == [END]
    assert matcher.finished


def test_every_end_token_of_the_model_counts() -> None:
    tokenizer = type(PLAIN)(PLAIN._tokenizer, eos_token_ids=[0, 2])
    matcher = Grammars(tokenizer, WIDTH).compile(Constraint("choice", '[""]')).matcher()
    assert allowed(matcher) == [0, 2]


def test_a_replayed_matcher_goes_on_as_the_undisturbed_one() -> None:
    compiled = schema(SCHEMAS["from pydantic"])
    rng = np.random.default_rng(5)
    undisturbed, ids = compiled.matcher(), list[int]()
    while END not in allowed(undisturbed):
        resumed = compiled.matcher()
        resumed.replay(ids)
        assert allowed(resumed) == allowed(undisturbed)
        ids.append(int(rng.choice(allowed(undisturbed))))
        undisturbed.consume(ids[-1])


def test_matchers_of_one_grammar_are_independent() -> None:
    compiled = GRAMMARS.compile(Constraint("choice", '["ab", "cd"]'))
    one, other = compiled.matcher(), compiled.matcher()
    before = allowed(other)
    one.consume(vocabularies.ids_of("c", PLAIN)[0])
    assert allowed(other) == before


def test_a_token_that_is_not_allowed_fails_its_row() -> None:
    (wrong,) = vocabularies.ids_of("x", PLAIN)
    for step in (lambda m: m.consume(wrong), lambda m: m.replay([wrong])):
        matcher = GRAMMARS.compile(Constraint("choice", '["a"]')).matcher()
        with pytest.raises(GrammarFailed, match="satisfy"):
            step(matcher)
        with pytest.raises(GrammarFailed):
            allowed(matcher)


def test_ids_beyond_the_tokenizer_are_never_allowed_and_narrow_logits_are_fine() -> None:
    matcher = GRAMMARS.compile(Constraint("regex", "(?s:.*)")).matcher()
    assert max(allowed(matcher)) < len(PLAIN) < WIDTH
    narrow = len(PLAIN) - 100
    matcher = Grammars(PLAIN, narrow).compile(Constraint("regex", "(?s:.*)")).matcher()
    ids = allowed(matcher, narrow)
    assert END in ids
    assert max(ids) < (narrow + 31) // 32 * 32


def test_grammars_are_kept() -> None:
    assert schema(COLOUR) is schema(COLOUR)
    assert schema(COLOUR) is not schema(SCHEMAS["flat"])


def test_threads_may_compile_at_once() -> None:
    grammars = Grammars(PLAIN, WIDTH)
    with ThreadPoolExecutor(4) as pool:
        texts = list(
            pool.map(
                lambda n: sample(
                    grammars.compile(Constraint("json_schema", json.dumps(integer(n, n)))), n
                ),
                range(12),
            )
        )
    assert texts == [str(n) for n in range(12)]


@pytest.mark.parametrize(
    ("tokenizer", "why"),
    [
        (vocabularies.python_written(), "written in Python"),
        (
            type(PLAIN)(PLAIN._tokenizer.__class__(tokenizer_object=PLAIN._tokenizer._tokenizer)),
            "end",
        ),
    ],
)
def test_a_tokenizer_that_grammars_cannot_use_is_an_answer(tokenizer: Any, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        Grammars(tokenizer, WIDTH).compile(Constraint("choice", '["a"]'))


# After a thought


def spelled(text: str) -> Sequence[int]:
    return vocabularies.in_pieces(text, THINKING)


@pytest.mark.parametrize("marker", [vocabularies.ids_of("</think>", THINKING), spelled("</think>")])
def test_the_grammar_begins_where_the_thought_ends(marker: Sequence[int]) -> None:
    constraint = Constraint("json_schema", json.dumps(record(a=COLOUR)))
    matcher = Grammars(THINKING, WIDTH).compile(constraint, in_reasoning=True).matcher()
    for id in [*vocabularies.ids_of('hm {"a":7} <th', THINKING), *marker]:
        options = allowed(matcher)
        assert id in options
        assert END not in options
        matcher.consume(id)
    assert [THINKING.decode([id]) for id in allowed(matcher)] == ['{"']


@pytest.mark.parametrize("kind", ["thinking", "plain", "special"])
def test_thoughts_end_whatever_their_marker_is_made_of(kind: str) -> None:
    tokenizer = vocabularies.thinking_with(kind)
    compiled = Grammars(tokenizer, WIDTH).compile(Constraint("regex", "x+"), in_reasoning=True)
    matcher = compiled.matcher()
    matcher.replay(vocabularies.ids_of("so.</think>x", tokenizer))
    assert END in allowed(matcher)


# Forced calls

WEATHER = {
    "type": "function",
    "function": {
        "name": 'get "weather"',
        "parameters": {
            "$defs": {"unit": {"enum": ["C", "F"]}},
            "properties": {"unit": {"$ref": "#/$defs/unit"}, "days": integer(1, 9)},
            "required": ["unit"],
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}


def calls(prompt: ChatPrompt, seed: int, **options: Any) -> list[tuple[str, Any]]:
    """The calls that are read from a random output."""
    text = sample(GRAMMARS.tools(prompt, **options), seed)
    assert text is not None
    parts = Parts(guided_markers(PLAIN), tools=Tools(prompt.tools, None), forced=True)
    parts.feed(text)
    parts.end(complete=True)
    assert parts.content == ""
    return [(call.name, json.loads(call.arguments)) for call in parts.calls]


def required(**options: Any) -> ChatPrompt:
    return ChatPrompt((), tools=(WEATHER, NOW), tool_choice="required", **options)


def test_R12_required_calls_are_made_and_their_arguments_fit() -> None:
    counts, names = set(), set()
    for seed in range(30):
        made = calls(required(), seed)
        counts.add(len(made))
        names |= {name for name, _ in made}
        for name, arguments in made:
            if name == "now":
                assert arguments == {}
            else:
                jsonschema.validate(arguments, WEATHER["function"]["parameters"])  # type: ignore[index]
                assert arguments.keys() <= {"unit", "days"}
    assert names == {'get "weather"', "now"}
    assert min(counts) == 1
    assert max(counts) > 1


def test_one_call_without_parallel_calls_and_of_the_forced_tool() -> None:
    for seed in range(10):
        assert len(calls(required(parallel_tool_calls=False), seed)) == 1
        assert calls(required(forced_tool="now"), seed) == [("now", {})]


@pytest.mark.parametrize(
    ("parameters", "why"),
    [
        ({"type": "string"}, "type object"),
        ([], "type object"),
        (3, "type object"),
        ({"properties": {"a": {"type": "foo"}}}, "'f'.*#/properties/a: .*foo"),
        (record(a={"$ref": "#"}), "'f'.*# requires itself"),
    ],
)
def test_wrong_parameters_are_refused_and_the_tool_named(parameters: Any, why: str) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    prompt = ChatPrompt((), tools=(NOW, tool), tool_choice="required")
    if parameters == []:
        assert calls(prompt, 0)
        return
    with pytest.raises(InvalidRequest, match=why) as error:
        GRAMMARS.tools(prompt)
    assert error.value.param == "tools"


@pytest.mark.parametrize(
    "prompt", [ChatPrompt((), tool_choice="required"), required(forced_tool="x")]
)
def test_R12_a_forced_call_of_no_tool_is_refused(prompt: ChatPrompt) -> None:
    with pytest.raises(InvalidRequest) as error:
        GRAMMARS.tools(prompt)
    assert error.value.param == "tool_choice"
