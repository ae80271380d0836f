"""A choice's text: its pieces make up the whole, and a replayed choice goes on as if nothing had
happened."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mayfly_protocol.requests import (
    ChatPrompt,
    Constraint,
    Ending,
    FinishReason,
    Generation,
    Output,
    Sampling,
    TextPrompt,
)
from mayfly_worker.text.call_ids import call_id
from mayfly_worker.text.choice import NOTHING, ChoiceText, TextPiece
from mayfly_worker.text.prompts import RenderedPrompt
from support import vocabularies

THINKING = vocabularies.byte_level("thinking")
END = 2
TOOL = {
    "type": "function",
    "function": {"name": "sum", "parameters": {"type": "object", "properties": {"x": {}}}},
}
CALL = '<tool_call>\n{"name": "sum", "arguments": {"x": 1}}\n</tool_call>'


def choice(
    *,
    chat: dict[str, Any] | None = None,
    output: Output | None = None,
    tokenizer: Any = THINKING,
    in_reasoning: bool = False,
    **ending: Any,
) -> ChoiceText:
    """A chat's choice, or with ``chat`` None that of a completion."""
    prompt = TextPrompt("") if chat is None else ChatPrompt((), **chat)
    generation = Generation(
        "m",
        prompt,
        Sampling(seed=0),
        Ending(**ending),
        output or Output(split=chat is not None),
    )
    rendered = RenderedPrompt([0], in_reasoning=in_reasoning)
    return ChoiceText(generation, tokenizer, rendered, rid="r", choice=3)


def run(text: ChoiceText, ids: Sequence[int], reason: FinishReason | None = "stop") -> TextPiece:
    """Joins all pieces: up to a stop, or to the end for a reason (``stop``: an end token)."""
    whole = NOTHING
    for id in ids:
        whole = whole.joined(text.feed(id))
        if whole.finish:
            return whole
    if reason is None:
        return whole
    return whole.joined(text.feed(END, eos=True) if reason == "stop" else text.end(reason))


def ids_of(text: str) -> list[int]:
    return vocabularies.ids_of(text, THINKING)


# The whole


def expected(ids: list[int], stops: list[str], reason: FinishReason) -> TextPiece:
    text = THINKING.decode(ids, skip_special_tokens=True)
    found = [(text.find(s) + len(s), -len(s)) for s in stops if s in text]
    if not found:
        return TextPiece(text, finish=reason)
    end, length = min(found)
    return TextPiece(text[: end + length], finish="stop")


any_ids = st.lists(
    st.integers(0, len(THINKING) - 1) | st.integers(3, 258) | st.sampled_from(ids_of("an the.\n")),
    max_size=50,
)
reasons: st.SearchStrategy[FinishReason] = st.sampled_from(["stop", "length"])


@st.composite
def ids_and_stops(draw: st.DrawFn) -> tuple[list[int], list[str]]:
    """Random ids, and stops that are mostly substrings of their text."""
    ids = draw(any_ids)
    text = THINKING.decode(ids, skip_special_tokens=True)
    stops = draw(st.lists(st.text(min_size=1, max_size=3), max_size=2))
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, max(0, len(text) - 1)))
        stops.append(text[at : at + draw(st.integers(1, 5))])
    return ids, [s for s in stops if s]


@settings(deadline=None)
@given(ids_and_stops(), reasons)
def test_R29_R32_pieces_make_up_the_text_before_the_first_stop(
    case: tuple[list[int], list[str]], reason: FinishReason
) -> None:
    ids, stops = case
    assert run(choice(stop=tuple(stops)), ids, reason) == expected(ids, stops, reason)


markers = st.sampled_from(
    [ids_of(s) for s in ["<think>", "</think>", "<tool_call>", "</tool_call>", CALL, "text", "<"]]
    + [vocabularies.in_pieces(s, THINKING) for s in ["</think>", CALL, "🦄", "<tool_"]]
)


@settings(deadline=None)
@given(
    st.lists(markers | any_ids, max_size=8).map(lambda lists: list(chain(*lists))),
    st.sampled_from([(), ("text",), ("</", "k>"), ("arguments", "<tool_call>x")]),
    st.booleans(),
    st.integers(0, 40),
    reasons,
)
def test_a_replayed_choice_goes_on_as_the_undisturbed_one(
    ids: list[int], stop: tuple[str, ...], parallel: bool, min_tokens: int, reason: FinishReason
) -> None:
    chat = {"tools": (TOOL,), "parallel_tool_calls": parallel}

    def fresh() -> ChoiceText:
        return choice(chat=chat, stop=stop, min_tokens=min_tokens)

    undisturbed = fresh()
    pieces: list[TextPiece] = []
    for id in ids:
        pieces.append(undisturbed.feed(id))
        if pieces[-1].finish:
            break
    else:
        pieces.append(undisturbed.end(reason))
    fed = ids[: undisturbed.tokens]
    for cut in range(len(fed)):
        resumed = fresh()
        assert resumed.replay(fed[:cut]) is None
        rest = [resumed.feed(id) for id in fed[cut:]]
        if not rest or not rest[-1].finish:
            rest.append(resumed.end(reason))
        assert rest == pieces[cut:]
        assert resumed.reasoning_tokens == undisturbed.reasoning_tokens


def test_replaying_an_ended_choice_says_how_it_ended() -> None:
    assert choice(stop=("b",)).replay(ids_of("a") + ids_of("b")) == "stop"
    chat = {"tools": (TOOL,), "parallel_tool_calls": False}
    assert choice(chat=chat).replay(ids_of(CALL)) == "tool_calls"


# Endings


def test_R26_length_gives_out_what_was_held_back() -> None:
    assert run(choice(stop=("abc",)), ids_of("xab"), "length") == TextPiece("xab", finish="length")


def test_half_a_character_at_the_end_can_complete_a_stop() -> None:
    ids = vocabularies.in_pieces("a🦄", THINKING)[:-1]
    assert run(choice(stop=("�",)), ids, "length") == TextPiece("a", finish="stop")


def test_a_stop_can_be_included() -> None:
    assert run(choice(stop=("b",), include_stop=True), ids_of("abc")) == TextPiece(
        "ab", finish="stop"
    )


def test_an_end_token_has_no_text_unless_stops_are_included() -> None:
    word = ids_of("the")[0]
    assert choice().feed(word, eos=True) == TextPiece(finish="stop")
    assert choice(include_stop=True).feed(word, eos=True) == TextPiece("the", finish="stop")
    assert choice(include_stop=True).feed(END, eos=True) == TextPiece(finish="stop")


def test_an_ignored_end_token_is_hidden() -> None:
    assert run(choice(), [*ids_of("a"), END, *ids_of("b")]).text == "ab"


def test_stops_count_from_the_least_number_of_tokens_on() -> None:
    ids = vocabularies.in_pieces("xyxyxy", THINKING)
    assert run(choice(stop=("y",)), ids).text == "x"
    assert run(choice(stop=("y",), min_tokens=2), ids).text == "x"
    assert run(choice(stop=("y",), min_tokens=3), ids).text == "xyx"
    assert run(choice(stop=("y",), min_tokens=9), ids) == TextPiece("xyxyxy", finish="stop")


def test_the_token_that_completes_a_stop_is_the_last() -> None:
    text = choice(stop=("bc",))
    ids = vocabularies.in_pieces("abcd", THINKING)
    assert [text.feed(id).finish for id in ids[:3]] == [None, None, "stop"]
    assert text.tokens == 3


def test_R34_hi_comes_before_the_emoji() -> None:
    ids = [*ids_of("hi"), *vocabularies.in_pieces("🦄", THINKING), *ids_of(" ok")]
    text = choice(chat={})
    pieces = [text.feed(id).text for id in ids]
    arrivals = [(at, piece) for at, piece in enumerate(pieces) if piece]
    assert "".join(piece for _, piece in arrivals) == "hi🦄 ok"
    assert next(at for at, piece in arrivals if "i" in piece) < len(ids_of("hi"))
    assert all("�" not in piece for piece in pieces)


# Reasoning


def test_reasoning_is_split_off_and_counted() -> None:
    text = choice(chat={})
    thought = ids_of("<think>let me see</think>")
    assert run(text, [*thought, *ids_of("42")]) == TextPiece("42", "let me see", (), "stop")
    assert text.reasoning_tokens == len(thought) - 1
    assert text.tokens == len(thought) + len(ids_of("42")) + 1


def test_reasoning_goes_on_from_a_thought_that_the_prompt_opened() -> None:
    text = choice(chat={}, in_reasoning=True)
    assert run(text, ids_of("see</think>42")) == TextPiece("42", "see", (), "stop")


def test_a_completion_comes_as_it_is() -> None:
    text = "<think>see</think>" + CALL
    assert run(choice(), ids_of(text)) == TextPiece(text, finish="stop")


def test_N10_a_stop_string_within_a_thought_does_not_end_the_answer() -> None:
    text = choice(chat={}, in_reasoning=True, stop=("see",))
    assert run(text, ids_of("let me see</think>I see 42")) == TextPiece(
        "I ", "let me see", (), "stop"
    )


def test_N10_a_stop_string_across_a_thought_and_the_answer_is_none() -> None:
    text = choice(chat={}, in_reasoning=True, stop=("e4",))
    assert run(text, ids_of("see</think>42")) == TextPiece("42", "see", (), "stop")


def test_N10_a_stop_string_within_a_call_does_not_cut_it() -> None:
    text = choice(chat={"tools": (TOOL,)}, stop=("arguments", "tool_call"))
    found = run(text, ids_of(CALL))
    assert (found.finish, text.stop, len(found.tool_calls)) == ("tool_calls", None, 1)


def test_N10_no_call_follows_a_stop_string() -> None:
    text = choice(chat={"tools": (TOOL,)}, stop=("well",))
    assert run(text, ids_of("oh well" + CALL)) == TextPiece("oh ", finish="stop")


# Tool calls


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_R13_R14_calls_have_indexes_ids_and_their_finish_reason(reason: FinishReason) -> None:
    whole = run(choice(chat={"tools": (TOOL,)}), ids_of("ok" + CALL + "\n" + CALL), reason)
    assert whole.text == "ok"
    assert [(c.index, c.id, c.name) for c in whole.tool_calls] == [
        (0, call_id("r", 3, 0), "sum"),
        (1, call_id("r", 3, 1), "sum"),
    ]
    assert [json.loads(c.arguments) for c in whole.tool_calls] == [{"x": 1}, {"x": 1}]
    assert whole.finish == "tool_calls"


def test_R14_without_a_call_it_is_a_stop() -> None:
    assert run(choice(chat={"tools": (TOOL,)}), ids_of("no")) == TextPiece("no", finish="stop")


@pytest.mark.parametrize("inside", ["find <k>glob</k><v>*.txt</v>", " \n "])
def test_R07_R09_a_broken_call_is_content(inside: str) -> None:
    text = f"<tool_call>{inside}</tool_call>"
    assert run(choice(chat={"tools": (TOOL,)}), ids_of(text)) == TextPiece(text, finish="stop")


@pytest.mark.parametrize("chat", [{}, {"tools": (TOOL,), "tool_choice": "none"}])
def test_R10_without_tools_nothing_is_called(chat: dict[str, Any]) -> None:
    assert run(choice(chat=chat), ids_of(CALL)) == TextPiece(CALL, finish="stop")


def test_a_call_cut_off_by_length_is_content() -> None:
    cut = CALL[:-20]
    whole = run(choice(chat={"tools": (TOOL,)}), ids_of(cut), "length")
    assert whole == TextPiece(cut, finish="length")


@pytest.mark.parametrize("left_out", range(1, len(ids_of(CALL))))
def test_a_second_call_that_is_cut_off_ends_by_length(left_out: int) -> None:
    """The answer is incomplete, although there is a call to be made."""
    ids = ids_of(CALL + CALL)[:-left_out]
    whole = run(choice(chat={"tools": (TOOL,)}), ids, "length")
    begun = THINKING.decode(ids_of(CALL)[:-left_out])
    assert (len(whole.tool_calls), whole.text, whole.finish) == (1, begun, "length")


def test_one_call_is_enough_without_parallel_calls() -> None:
    text = choice(chat={"tools": (TOOL,), "parallel_tool_calls": False})
    whole = run(text, ids_of(CALL + CALL))
    assert (len(whole.tool_calls), whole.finish) == (1, "tool_calls")
    assert text.tokens == len(ids_of(CALL))


def test_forced_calls_are_read_from_json() -> None:
    text = choice(chat={"tools": (TOOL,), "tool_choice": "required"}, in_reasoning=True)
    whole = run(text, ids_of('hm</think>[{"name":"sum","arguments":{"x":"<think>"}}]'))
    assert (whole.text, whole.reasoning, whole.finish) == ("", "hm", "tool_calls")
    assert json.loads(whole.tool_calls[0].arguments) == {"x": "<think>"}


def test_markers_mean_nothing_in_guided_output() -> None:
    output = Output(split=True, constraint=Constraint("regex", ".*"))
    whole = run(choice(chat={"tools": (TOOL,)}, output=output), ids_of("<think>" + CALL))
    assert whole == TextPiece("<think>" + CALL, finish="stop")


def test_special_tokens_that_markers_and_calls_are_made_of_are_seen() -> None:
    tokenizer = vocabularies.with_parser("mistral", special=True)
    text = choice(chat={"tools": (TOOL,)}, tokenizer=tokenizer)
    ids = vocabularies.ids_of('<|im_start|>a[ARGS][TOOL_CALLS]sum[ARGS]{"x": 1}', tokenizer)
    whole = run(text, ids)
    assert (whole.text, whole.finish) == ("a", "tool_calls")
    assert whole.tool_calls[0].arguments == '{"x": 1}'
    # Seen is not hidden: without tools the marker is text, the rest of the specials is not.
    assert run(choice(chat={}, tokenizer=tokenizer), ids).text == 'a[TOOL_CALLS]sum{"x": 1}'
