"""Tool calls in pieces, in every format: joined they are the whole call, however its text is cut,
and they come as the text does."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mayfly_protocol.requests import ChatPrompt, Ending, Generation, Output, Sampling
from mayfly_protocol.serving import ToolCallDelta
from mayfly_worker.text.choice import ChoiceText, TextPiece
from mayfly_worker.text.dialects.dialect import Dialect
from mayfly_worker.text.dialects.families import DIALECTS
from mayfly_worker.text.dialects.families import FORCED as FORCED_CALLS
from mayfly_worker.text.dialects.json_calls import read_json_calls
from mayfly_worker.text.markers import guided_markers, markers_of
from mayfly_worker.text.output_parser import OutputParser
from mayfly_worker.text.prompts import RenderedPrompt
from mayfly_worker.text.tool_calls import CallPiece, CallText, ParsedCall, ToolCallParser
from support import vocabularies
from support.call_writer import BARE, FORCED, ONE_CALL, WRITERS, Call

FORMATS = sorted(WRITERS)
PROPERTIES: dict[str, Any] = {
    "path": {"type": "string"},
    "lines": {"type": "integer"},
    "share": {"type": "number"},
    "deep": {"type": "boolean"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "options": {"type": "object"},
    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "mixed": {"type": ["string", "integer"]},
    "kind": {"type": "string", "enum": ["a", "b"]},
    "open": {},
}
NAMES = ("write_file", "glob")
TOOLS = tuple(
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": PROPERTIES}},
    }
    for name in NAMES
)


def dialect(name: str) -> Dialect:
    return FORCED_CALLS if name == FORCED else DIALECTS[name.partition("/")[0]]


def markers(name: str) -> tuple[str, str]:
    used = dialect(name)
    if name == FORCED or name in BARE:
        return "", ""
    return used.starts[0], used.ends[0] if used.ends else ""


def written(name: str, calls: list[Call]) -> str:
    """Calls as a model writes them, with the format's markers."""
    start, end = markers(name)
    sections = [[call] for call in calls] if name in ONE_CALL else [calls]
    return "\n".join(f"{start}{WRITERS[name](section)}{end}" for section in sections)


def output_parser(name: str, *, early: bool, parallel: bool = True) -> OutputParser:
    if name == FORCED:
        tools = ToolCallParser(TOOLS, FORCED_CALLS)
        found = guided_markers(vocabularies.byte_level("thinking"))
        return OutputParser(found, tools=tools, forced=True, early=early, parallel=parallel)
    found = markers_of(tokenizer(name), True)
    tools = ToolCallParser(TOOLS, dialect(name))
    return OutputParser(found, tools=tools, early=early, parallel=parallel)


@dataclass
class Answer:
    """An answer's content and calls. ``broken`` is what was given out of a call that was left
    unfinished."""

    content: str
    calls: list[ParsedCall]
    broken: str | None


def joined(content: str, pieces: list[CallPiece]) -> Answer:
    calls: list[ParsedCall] = []
    for at, piece in enumerate(pieces):
        if piece.name is not None:
            assert piece.arguments
            calls.append(ParsedCall(piece.name, piece.arguments))
        else:
            calls[-1] = ParsedCall(calls[-1].name, calls[-1].arguments + piece.arguments)
        if piece.unfinished:
            assert at == len(pieces) - 1
            return Answer(content, calls[:-1], calls[-1].arguments)
    return Answer(content, calls, None)


def answer(name: str, pieces: list[str], *, early: bool, complete: bool = True) -> Answer:
    parser = output_parser(name, early=early)
    for piece in pieces:
        parser.feed(piece)
    parser.end(complete=complete)
    assert not (parser.broken and parser.content.endswith("tail"))
    return joined(parser.content, parser.calls)


def in_pieces(text: str, cuts: list[int]) -> list[str]:
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(places)]


CHARACTERS = list("ab \n\t\"'\\/{}[]<>&,:=|.#-1é🦄\ud83d\0")
NEARLY = """null None NULL nullable true 12 -1.5e3 {} {"a":1} [1,2] (1,2) 'a' "a" <![CDATA[x]]>
]]> </ <|"""
texts = st.lists(st.sampled_from(CHARACTERS) | st.text(max_size=3), max_size=8).map("".join)
texts |= st.sampled_from([*NEARLY.split(), "NULL\n", "\n\n", " x ", "```py\nx\n```"])
numbers = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=2)
    ),
    max_leaves=5,
)
arguments = st.dictionaries(st.sampled_from([*PROPERTIES, "unknown"]), values, max_size=4)
calls = st.lists(st.tuples(st.sampled_from(NAMES), arguments), min_size=1, max_size=3)
cuts = st.lists(st.integers(0, 2000), max_size=30)


@pytest.mark.parametrize("name", FORMATS)
@settings(deadline=None, max_examples=12)
@given(calls, cuts)
def test_N26_pieces_join_to_the_whole_calls(name: str, calls: list[Call], cuts: list[int]) -> None:
    if name == "function_gemma":  # has no values within values
        calls = [(called, {k: str(v) for k, v in given.items()}) for called, given in calls]
    text = written(name, calls)
    whole = answer(name, [text], early=False)
    found = answer(name, in_pieces(text, cuts), early=True)
    for call in found.calls:
        assert isinstance(json.loads(call.arguments), dict)
    if whole.calls == [] or found.broken is not None:
        # The text cannot be read as it was written.
        assert found.calls == whole.calls[: len(found.calls)] or not whole.calls
    else:
        assert found == whole
    if found.broken is not None:
        with pytest.raises(ValueError):
            json.loads(found.broken)
        assert len(whole.calls) < len(calls), (text, whole, found)


@pytest.mark.parametrize("name", FORMATS)
@settings(deadline=None, max_examples=6)
@given(calls, cuts, st.data())
def test_what_is_no_call_any_more_is_never_sent_as_one(
    name: str, calls: list[Call], cuts: list[int], data: st.DataObject
) -> None:
    """Parts of the text are left out, doubled or replaced, or the answer ends in the middle."""
    text = written(name, calls)
    for _ in range(data.draw(st.integers(0, 3))):
        a, b = sorted((data.draw(st.integers(0, len(text))), data.draw(st.integers(0, len(text)))))
        text = text[:a] + data.draw(st.sampled_from(["", text[a:b] * 2, "]", "}", '"'])) + text[b:]
    complete = data.draw(st.booleans())
    found = answer(name, in_pieces(text, cuts), early=True, complete=complete)
    for call in found.calls:
        assert call.name in NAMES
        assert isinstance(json.loads(call.arguments), dict)
    if found.broken is not None:
        assert found.broken.startswith("{")
        with pytest.raises(ValueError):
            json.loads(found.broken)


WRITE = ("write_file", {"lines": 12, "path": "/tmp/x.py", "note": "Plain words, and more of them."})


def test_a_call_of_an_unknown_tool_stays_text() -> None:
    for name in FORMATS:
        text = written(name, [("format_disk", WRITE[1])])
        assert answer(name, list(text), early=True) == Answer(text, [], None)


def test_calls_before_one_of_an_unknown_tool_stand() -> None:
    for name in set(FORMATS) - {"kimi_k3"}:  # whose parser leaves out what it cannot read
        found = answer(
            name, list(written(name, [WRITE, ("format_disk", {"path": "/"})])), early=True
        )
        assert [call.name for call in found.calls] == ["write_file"]
        assert json.loads(found.calls[0].arguments) == WRITE[1]
        assert found.broken is None
        assert "format_disk" in found.content and "write_file" not in found.content


def test_without_parallel_calls_the_first_one_ends_the_answer() -> None:
    for name in FORMATS:
        parser = output_parser(name, early=True, parallel=False)
        for character in written(name, [WRITE, WRITE]) + "tail":
            parser.feed(character)
        assert parser.full
        parser.end(complete=True)
        found = joined(parser.content, parser.calls)
        assert [json.loads(call.arguments) for call in found.calls] == [WRITE[1]]
        assert (found.content, found.broken) == ("", None)


# From ids


def choice(name: str, *, stop: tuple[str, ...] = (), early: bool = True) -> ChoiceText:
    forced = name == FORCED
    prompt = ChatPrompt((), TOOLS, tool_choice="required" if forced else "auto")
    output = Output(split=True, early_calls=early)
    generation = Generation("m", prompt, Sampling(seed=0), Ending(stop=stop), output)
    return ChoiceText(generation, tokenizer(name), RenderedPrompt([0]), rid="r", choice=0)


def tokenizer(name: str) -> Any:
    if name == FORCED:
        return vocabularies.byte_level("thinking")
    return vocabularies.with_parser(dialect(name).name)


def call_pieces(pieces: list[TextPiece]) -> list[ToolCallDelta]:
    return [call for piece in pieces for call in piece.tool_calls]


@pytest.mark.parametrize("name", FORMATS)
def test_N26_text_comes_within_two_tokens(name: str) -> None:
    """The first bytes of arguments, and each word of a string."""
    words = [f"word{n}" for n in range(20)]
    text = written(name, [("write_file", {"path": " ".join(words)})])
    ids = vocabularies.ids_of(text, tokenizer(name))
    fed, sent, seen = "", "", choice(name)
    at: dict[str, int] = {}
    for number, id in enumerate(ids):
        fed += tokenizer(name).decode([id])
        for call in call_pieces([seen.feed(id)]):
            sent += call.arguments
        for word in words:
            if f"{word} " in fed and word not in sent:
                assert number - at.setdefault(word, number) < 2, (word, sent)
        if words[0][:2] in fed:
            assert number - at.setdefault("first", number) < 2 or sent
    assert words[-2] in sent


@pytest.mark.parametrize("name", FORMATS)
def test_a_replayed_choice_goes_on_in_the_middle_of_arguments(name: str) -> None:
    """Another worker sends the pieces that the first one would have sent, from any id on."""
    calls = [("write_file", {"lines": 12, "path": "a b"}), ("glob", {"path": "é🦄 'x'\n \n"})]
    ids = vocabularies.ids_of(written(name, calls), tokenizer(name))
    undisturbed = choice(name)
    pieces = [*map(undisturbed.feed, ids), undisturbed.end("stop")]
    assert pieces[-1].finish == "tool_calls"
    assert len(call_pieces(pieces)) > 4
    for cut in range(len(ids)):
        resumed = choice(name)
        assert resumed.replay(ids[:cut]) is None
        assert [*map(resumed.feed, ids[cut:]), resumed.end("stop")] == pieces[cut:]


@pytest.mark.parametrize("reason", ["stop", "length"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_is_not_finished_ends_the_choice(name: str, reason: Any) -> None:
    text = written(name, [WRITE])
    ids = vocabularies.ids_of(text[: text.index("Plain")] + "Plain words", tokenizer(name))
    one = choice(name)
    pieces = [*map(one.feed, ids), one.end(reason)]
    sent = call_pieces(pieces)
    assert [call.unfinished for call in sent] == [*([False] * (len(sent) - 1)), True]
    assert "Plain" in "".join(call.arguments for call in sent)
    assert (pieces[-1].finish, pieces[-1].text) == (reason, "")
    if reason == "length":
        whole = choice(name, early=False)
        pieces = [*map(whole.feed, ids), whole.end(reason)]
        assert call_pieces(pieces) == []
        assert "".join(piece.text for piece in pieces) == tokenizer(name).decode(ids)


def test_N10_a_stop_string_within_the_arguments_does_not_cut_them() -> None:
    one = choice("json_tools", stop=("words",))
    ids = vocabularies.ids_of(written("json_tools", [WRITE]), tokenizer("json_tools"))
    pieces = [one.feed(id) for id in ids]
    arguments = "".join(call.arguments for call in call_pieces(pieces))
    assert "words" in arguments
    assert json.loads(arguments) == WRITE[1]
    assert one.stop is None


def test_R07_a_call_that_turns_out_unreadable_is_left_unfinished() -> None:
    text = r'<tool_call>{"name": "glob", "arguments": {"path": "a\qb"}}</tool_call>'
    one = choice("json_tools")
    pieces = []
    for id in vocabularies.ids_of(text + "and more", tokenizer("json_tools")):
        pieces.append(one.feed(id))
        if pieces[-1].finish:
            break
    assert pieces[-1] == TextPiece("", "", (ToolCallDelta(0, "", unfinished=True),), "stop")


def test_R07_a_repeated_argument_is_never_sent_wrongly() -> None:
    """Parsers take the last one; the first was sent."""
    text = '<tool_call>{"name": "glob", "arguments": {"path": "a", "path": "b"}}</tool_call>'
    assert answer("json_tools", [text], early=False).calls == [ParsedCall("glob", '{"path": "b"}')]
    assert answer("json_tools", list(text), early=True).broken == '{"path": "a"'


@pytest.mark.parametrize(
    "inside", ["find <k>glob</k>", " \n ", '{"name": "glob", "arguments": "x"}']
)
def test_R07_R09_what_has_no_arguments_yet_is_text(inside: str) -> None:
    text = f"<tool_call>{inside}</tool_call>"
    assert answer("json_tools", list(text), early=True) == Answer(text, [], None)


def test_R07_nothing_is_sent_of_a_call_after_it_turned_out_unreadable() -> None:
    odd = Dialect(name="odd", parse=lambda *_: None, read=read_json_calls)
    call = CallText(ToolCallParser(TOOLS, odd), early=True, parallel=True)
    call.feed('{"name": "glob", "arguments": {"path": "a"')
    call.feed(', "lines": 1}}, {"name"')
    assert call.broken
    assert [piece.arguments for piece in call.pieces] == ['{"path": "a"', ""]
    assert [piece.unfinished for piece in call.pieces] == [False, True]
