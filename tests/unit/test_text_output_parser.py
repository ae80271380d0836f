"""Reasoning, content and tool calls, parsed from text in pieces of any size."""

from __future__ import annotations

import json
import pkgutil
import re
from typing import Any

import mlx_lm.tool_parsers
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mayfly_worker.text.automaton import Automaton
from mayfly_worker.text.call_ids import call_id
from mayfly_worker.text.dialects.dialect import REASONING, Dialect, Framing, Routed
from mayfly_worker.text.dialects.families import DIALECTS, FORCED
from mayfly_worker.text.markers import Markers, Transitions, guided_markers, markers_of
from mayfly_worker.text.output_parser import OutputParser
from mayfly_worker.text.tool_calls import CallPiece, ParsedCall, ToolCallParser
from support import vocabularies

THINKING = vocabularies.byte_level("thinking")
PARSERS = [module.name for module in pkgutil.iter_modules(mlx_lm.tool_parsers.__path__)]


def function(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = (function("sum", x={"type": "integer"}), function("glob", pattern={"type": "string"}))


def parts(*, tools: bool = True, **options: Any) -> OutputParser:
    parser = ToolCallParser(TOOLS, DIALECTS["json_tools"]) if tools else None
    return OutputParser(markers_of(THINKING, tools), tools=parser, **options)


def run(
    parts: OutputParser, pieces: list[str], *, complete: bool = True
) -> tuple[str, str, list[ParsedCall]]:
    for piece in pieces:
        parts.feed(piece)
    parts.end(complete=complete)
    return parts.content, parts.reasoning, whole(parts.calls)


def whole(calls: list[CallPiece]) -> list[ParsedCall]:
    """Calls of one piece each."""
    assert not any(piece.unfinished for piece in calls)
    return [ParsedCall(piece.name or "", piece.arguments) for piece in calls]


def call(name: str, **arguments: Any) -> str:
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


# Against a plain reading of the whole text


CALL = "\0"
"""Stands for a call in the content that is read."""


def read_whole(text: str, state: str) -> tuple[str, str, list[ParsedCall]]:
    """Parses the whole text at once, by searching for the marker that comes next."""
    content = reasoning = collected = ""
    thinking = left = False
    came_from = state
    calls: list[ParsedCall] = []
    exits = {
        "normal": {"<think>": "reasoning", "<tool_call>": "tool", "</think>": "normal"},
        "reasoning": {"</think>": "normal", "<tool_call>": "tool", "<think>": "reasoning"},
        "tool": {"</tool_call>": "normal"},
    }

    def close(ending: str) -> str:
        found = ToolCallParser(TOOLS, DIALECTS["json_tools"]).parse(collected)
        calls.extend(found)
        return CALL if found else f"<tool_call>{collected}{ending}"

    while True:
        ahead = [(text.find(m), m) for m in exits[state] if m in text]
        at, marker = min(ahead, default=(len(text), ""))
        before, text = text[:at], text[at + len(marker) :]
        if state == "reasoning":
            reasoning += before
            thinking = thinking or bool(before.strip())
        elif state == "normal":
            content += before
        else:
            collected = before
            content += (closed := close(marker))
            left = left or (closed == CALL and came_from == "reasoning")
        if not marker:
            # White space before the first call, between calls and after the last one is no content.
            content = re.sub(rf"\A\s*(?={CALL})|{CALL}\s*(?={CALL}|\Z)", "", content)
            return content.replace(CALL, ""), reasoning, calls
        if (marker, state) in (("</think>", "normal"), ("<think>", "reasoning")):
            # No mark of a thought that begins or ends, but at a beginning or after a call in it.
            if state == "reasoning":
                reasoning += marker if thinking else ""
            elif content.strip() and not left:
                content += marker
            left = left and state == "reasoning"
            continue
        came_from, state = state, exits[state][marker]
        thinking = False
        begun = text.lstrip()
        if state == "tool" and begun[:1] not in ("", "{", "[") and begun.find("</tool_call>") != 0:
            state = "reasoning" if came_from == "reasoning" else "normal"
            if state == "reasoning":
                reasoning += marker
                thinking = True
            else:
                content += marker


fragments = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", "<", "<t", "</", "k>", "text ", "\n"]
) | st.sampled_from(
    [call("sum", x=1), call("nobody"), '{"name": "glob", "arguments": {"pattern": "*"}}']
)


@settings(deadline=None)
@given(st.lists(fragments, max_size=12), st.data(), st.sampled_from(["normal", "reasoning"]))
def test_parts_are_those_of_the_whole_text(
    parts_of_it: list[str], data: st.DataObject, state: str
) -> None:
    text = "".join(parts_of_it)
    assume("}{" not in text.replace("\n", ""))  # calls of one block count one by one
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert run(parts(state=state), pieces) == read_whole(text, state)


# Reasoning


def test_reasoning_goes_on_from_the_prompt() -> None:
    content, reasoning, _ = run(parts(state=REASONING), ["let me", " see</th", "ink>42"])
    assert (content, reasoning) == ("42", "let me see")


def test_text_is_held_back_only_while_it_may_be_a_marker() -> None:
    split = parts()
    seen = []
    for piece in ["a<", "b", "c</thin", "<tool"]:
        split.feed(piece)
        seen.append(split.content)
    assert seen == ["a", "a<b", "a<bc</thin", "a<bc</thin"]


# Tool calls


def test_a_call_comes_out_when_it_is_whole() -> None:
    split = parts()
    text = "before" + call("sum", x=3)
    for character in text[:-1]:
        split.feed(character)
    assert (split.content, split.calls) == ("before", [])
    split.feed(text[-1])
    assert whole(split.calls) == [ParsedCall("sum", '{"x": 3}')]


def test_R13_several_calls_come_in_their_order() -> None:
    _, _, calls = run(parts(), [call("sum", x=1) + "\n" + call("glob", pattern="*")])
    assert [c.name for c in calls] == ["sum", "glob"]


def test_without_parallel_calls_the_first_one_ends_it() -> None:
    split = parts(parallel=False)
    split.feed(call("sum", x=1) + call("sum", x=2) + "tail")
    assert split.full
    split.feed("more")
    split.end(complete=True)
    assert (split.content, whole(split.calls)) == ("", [ParsedCall("sum", '{"x": 1}')])


def test_without_parallel_calls_one_of_a_list_counts() -> None:
    tools = ToolCallParser(
        TOOLS,
        Dialect(
            name="two", parse=lambda *_: [{"name": "sum", "arguments": {"x": n}} for n in "ab"]
        ),
    )
    split = OutputParser(markers_of(THINKING, True), tools=tools, parallel=False)
    split.feed("<tool_call>both</tool_call>")
    assert whole(split.calls) == [ParsedCall("sum", '{"x": "a"}')]


@pytest.mark.parametrize(
    "inside",
    [
        "find <k>glob</k><v>*.txt</v>",  # R07
        " \n ",  # R09
        "",
        "null",
        "3",
        '{"name": "nobody", "arguments": {}}',
        '{"name": "sum", "arguments": "{"}',
        '{"name": "sum", "arguments": "x"}',
        '{"name": "sum", "arguments": [1]}',
        '{"name": ["sum"], "arguments": {}}',
        "[]",
        '{"name": "sum", "arguments": {"x": NaN}}',
        "[" * 100_000,
    ],
)
def test_R07_R09_a_call_that_does_not_parse_comes_back_as_it_was(inside: str) -> None:
    text = f"a<tool_call>{inside}</tool_call>b"
    assert run(parts(), [text[:14], text[14:]]) == (text, "", [])


def test_R10_without_tools_markers_are_text() -> None:
    text = call("sum", x=1)
    assert run(parts(tools=False), [text]) == (text, "", [])


def test_a_call_without_its_end_marker_counts_where_the_model_ended_it() -> None:
    text = call("sum", x=1).removesuffix("</tool_call>")
    assert run(parts(), [text])[2] == [ParsedCall("sum", '{"x": 1}')]
    assert run(parts(), [text], complete=False) == (text, "", [])
    assert run(parts(), [text + "</tool_c"], complete=False)[0] == text + "</tool_c"


def test_a_format_without_end_marker_has_its_calls_at_the_end() -> None:
    tokenizer = vocabularies.with_parser("mistral")
    tools = ToolCallParser(TOOLS, DIALECTS["mistral"])
    split = OutputParser(markers_of(tokenizer, True), tools=tools)
    text = '[TOOL_CALLS]sum[ARGS]{"x": 1}[TOOL_CALLS]glob[ARGS]{"pattern": "*"}'
    _, _, calls = run(split, [text], complete=False)
    assert [c.name for c in calls] == ["sum", "glob"]


def test_a_call_out_of_a_thought_that_does_not_parse_is_content() -> None:
    assert run(parts(state=REASONING), ["hm<tool_call>{x</tool_call>y"]) == (
        "<tool_call>{x</tool_call>y",
        "hm",
        [],
    )


def test_a_thought_may_speak_of_markers() -> None:
    text = "I write <tool_call> before a call."
    assert run(parts(state=REASONING), [*text, "</think>Yes."]) == ("Yes.", text, [])


def test_half_a_surrogate_pair_stays_an_escape() -> None:
    text = '<tool_call>{"name": "sum", "arguments": {"x": "\\ud83d", "é": 1}}</tool_call>'
    (found,) = run(parts(), [text])[2]
    assert json.loads(found.arguments) == {"x": "\ud83d", "é": 1}
    found.arguments.encode()


def test_values_that_json_has_not_are_no_arguments() -> None:
    for value in ({1, 2}, b"x", float("inf"), 1j, object()):
        call = {"name": "sum", "arguments": {"x": value}}
        tools = ToolCallParser(TOOLS, Dialect(name="odd", parse=lambda *_, call=call: call))
        assert tools.parse("") == []


# Forced calls


def test_forced_calls_are_one_json_text_after_the_thought() -> None:
    split = OutputParser(
        guided_markers(THINKING), state=REASONING, tools=ToolCallParser(TOOLS, FORCED), forced=True
    )
    text = '[{"name":"sum","arguments":{"x":1}},{"name":"glob","arguments":{"pattern":"<think>"}}]'
    content, reasoning, calls = run(split, ["hm</think>", text[:20], text[20:]])
    assert (content, reasoning) == ("", "hm")
    assert [c.name for c in calls] == ["sum", "glob"]


def test_forced_calls_that_were_cut_off_are_content() -> None:
    split = OutputParser(guided_markers(THINKING), tools=ToolCallParser(TOOLS, FORCED), forced=True)
    assert run(split, ['[{"name":"sum"'], complete=False) == ('[{"name":"sum"', "", [])


# Headers of messages


def test_a_header_names_the_state_that_follows() -> None:
    """Its text is dropped; its recipient begins the text of a call."""

    def route(header: str, *, cut: bool = False) -> Routed:
        tool = header.partition("to=")[2]
        return Routed("reasoning" if header == "thought" else "normal", tool, tool)

    edges = {"normal": ["<h>"], "reasoning": ["<h>"], "tool": ["<h>"]}
    states = {
        state: Transitions(Automaton(out), ("header",) * len(out)) for state, out in edges.items()
    }
    states["header"] = Transitions(Automaton(["<m>"]), ("routed",))
    framing = Framing(route=route)
    found = Markers(states, initial="normal", endless_calls=True, framing=framing)

    def parse(text: str, tools: Any) -> Any:
        header, _, arguments = text.partition(" ")
        return {"name": header.removeprefix("to="), "arguments": json.loads(arguments)}

    def parser() -> OutputParser:
        tools = ToolCallParser(TOOLS, Dialect(name="headers", parse=parse))
        return OutputParser(found, tools=tools)

    text = '<h>thought<m>hm<h>final<m>Yes.<h>to=sum<m>{"x": 1}'
    assert run(parser(), list(text)) == ("Yes.", "hm", [ParsedCall("sum", '{"x": 1}')])
    unknown = "<h>to=other<m>{}"
    assert run(parser(), list(unknown + "<h>final<m>Yes.")) == ("to=other {}\n\nYes.", "", [])


# mlx-lm's formats

EXAMPLES = {
    "function_gemma": "call:glob{pattern:<escape>*<escape>}",
    "gemma4": 'call:glob{pattern:<|"|>*<|"|>}',
    "glm47": "glob<arg_key>pattern</arg_key><arg_value>*</arg_value>",
    "json_tools": '{"name": "glob", "arguments": {"pattern": "*"}}',
    "kimi_k2": 'functions.glob:0<|tool_call_argument_begin|>{"pattern": "*"}',
    "kimi_k3": '<|open|>call tool="glob" index="1"<|sep|><|open|>argument key="pattern" '
    'type="string"<|sep|>*<|close|>argument<|sep|><|close|>call<|sep|>',
    "laguna": "glob<arg_key>pattern</arg_key><arg_value>*</arg_value>",
    "longcat": "glob<longcat_arg_key>pattern</longcat_arg_key>"
    "<longcat_arg_value>*</longcat_arg_value>",
    "minicpm5": '"glob"><param name="pattern">*</param>',
    "minimax_m2": '<invoke name="glob"><parameter name="pattern">*</parameter></invoke>',
    "mistral": 'glob[ARGS]{"pattern": "*"}',
    "muse_spark": '<atem:invoke name="glob"><atem:parameter name="pattern">*</atem:parameter>'
    "</atem:invoke>",
    "pythonic": '[glob(pattern="*")]',
    "qwen3_coder": "<function=glob>\n<parameter=pattern>\n*\n</parameter>\n</function>",
}


@pytest.mark.parametrize("name", PARSERS)
def test_every_format_of_mlx_lm_is_read(name: str) -> None:
    tokenizer = vocabularies.with_parser(name)
    split = OutputParser(markers_of(tokenizer, True), tools=ToolCallParser(TOOLS, DIALECTS[name]))
    text = "".join((*DIALECTS[name].starts, EXAMPLES[name], *DIALECTS[name].ends))
    assert run(split, list(text)) == ("", "", [ParsedCall("glob", '{"pattern": "*"}')])


words = (
    st.sampled_from(
        ["sum", "glob", "name", "arguments", "null", "x", "1", "call:", "[ARGS]", "<arg_key>"]
    )
    | st.sampled_from(
        ["</arg_key>", "<function=", "<escape>", '<|"|>', "<invoke", "<parameter", "\ud83d"]
    )
    | st.sampled_from(list("{}[]()\":,=<>/-'\\ \n\0"))
)


@settings(deadline=None)
@given(st.sampled_from(PARSERS), st.lists(words, max_size=12).map("".join))
def test_no_parser_gives_anything_but_calls_of_these_tools(name: str, text: str) -> None:
    for found in ToolCallParser(TOOLS, DIALECTS[name]).parse(text):
        assert found.name in {"sum", "glob"}
        assert isinstance(json.loads(found.arguments), dict)


def test_call_ids_depend_on_request_choice_and_index_alone() -> None:
    ids = {call_id(r, c, i) for r in ("a", "b") for c in (0, 1) for i in (0, 1)}
    assert len(ids) == 8
    assert call_id("a", 0, 1) == call_id("a", 0, 1)
    assert all(id.startswith("call_") and len(id) == 29 for id in ids)
