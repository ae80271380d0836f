"""Grammars of whole answers: after a thought, and with required tool calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest

from mayfly_protocol.requests import ChatPrompt, Constraint
from mayfly_worker.grammar.compiler import GrammarCompiler
from mayfly_worker.request_errors import InvalidInput
from mayfly_worker.text.dialects.families import FORCED
from mayfly_worker.text.markers import guided_markers
from mayfly_worker.text.output_parser import OutputParser
from mayfly_worker.text.tool_calls import ToolCallParser
from support import vocabularies
from support.grammar import END, GRAMMARS, PLAIN, WIDTH, allowed, sample
from support.schemas import COLOUR, integer, record

THINKING = vocabularies.byte_level("thinking")


# After a thought


def spelled(text: str) -> Sequence[int]:
    return vocabularies.in_pieces(text, THINKING)


@pytest.mark.parametrize("marker", [vocabularies.ids_of("</think>", THINKING), spelled("</think>")])
def test_the_grammar_begins_where_the_thought_ends(marker: Sequence[int]) -> None:
    constraint = Constraint("json_schema", json.dumps(record(a=COLOUR)))
    matcher = GrammarCompiler(THINKING, WIDTH).compile(constraint, in_reasoning=True).matcher()
    for id in [*vocabularies.ids_of('hm {"a":7} <th', THINKING), *marker]:
        options = allowed(matcher)
        assert id in options
        assert END not in options
        matcher.consume(id)
    assert [THINKING.decode([id]) for id in allowed(matcher)] == ['{"']


@pytest.mark.parametrize("kind", ["thinking", "plain", "special"])
def test_thoughts_end_whatever_their_marker_is_made_of(kind: str) -> None:
    tokenizer = vocabularies.thinking_with(kind)
    compiled = GrammarCompiler(tokenizer, WIDTH).compile(
        Constraint("regex", "x+"), in_reasoning=True
    )
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
    parts = OutputParser(
        guided_markers(PLAIN), tools=ToolCallParser(prompt.tools, FORCED), forced=True
    )
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
    with pytest.raises(InvalidInput, match=why) as error:
        GRAMMARS.tools(prompt)
    assert error.value.param == "tools"


@pytest.mark.parametrize(
    "prompt", [ChatPrompt((), tool_choice="required"), required(forced_tool="x")]
)
def test_R12_a_forced_call_of_no_tool_is_refused(prompt: ChatPrompt) -> None:
    with pytest.raises(InvalidInput) as error:
        GRAMMARS.tools(prompt)
    assert error.value.param == "tool_choice"
