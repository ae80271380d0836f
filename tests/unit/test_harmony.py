"""Harmony, the format of gpt-oss: thoughts, answers and calls in messages with headers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mayfly_protocol.requests import (
    ChatPrompt,
    Constraint,
    Ending,
    Generation,
    Output,
    Sampling,
)
from mayfly_worker.grammar.compiler import GrammarCompiler
from mayfly_worker.text.choice import ChoiceText
from mayfly_worker.text.dialects.families import DIALECTS
from mayfly_worker.text.dialects.harmony import HARMONY
from mayfly_worker.text.dialects.registry import choose_format, output_format
from mayfly_worker.text.markers import markers_of
from mayfly_worker.text.output_parser import OutputParser
from mayfly_worker.text.prompts import RenderedPrompt, render
from mayfly_worker.text.tool_calls import ToolCallParser
from support import answer_templates, vocabularies
from support.call_samples import TOOLS, Calls
from support.grammar import WIDTH, accepts
from support.schemas import COLOUR as COLOURS
from support.schemas import record

TOKENIZER = vocabularies.harmony()
VOCABULARY = TOKENIZER.get_vocab()
PROMPT = RenderedPrompt([0])

ARGUMENTS = '{"city": "Paris", "days": 3}'
WEATHER = ("get_weather", {"city": "Paris", "days": 3})
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"


def generation(**fields: Any) -> Generation:
    prompt = fields.pop("prompt", ChatPrompt((), TOOLS))
    ending = fields.pop("ending", Ending())
    output = replace(Output(split=True), **fields)
    return Generation("gpt-oss", prompt, Sampling(seed=0), ending, output)


def ids_of(text: str) -> list[int]:
    return vocabularies.ids_of(text, TOKENIZER)


class Read:
    """Content, thought, calls and end of an answer with these token ids."""

    def __init__(
        self,
        ids: list[int],
        *,
        end: str = "stop",
        rendered: RenderedPrompt = PROMPT,
        **fields: Any,
    ) -> None:
        self.choice = ChoiceText(generation(**fields), TOKENIZER, rendered, rid="r", choice=0)
        self.pieces = []
        self.protocol = []
        for id in ids:
            if self.pieces and self.pieces[-1].finish:
                break
            self.pieces.append(self.choice.feed(id))
            self.protocol.append(self.choice.protocol)
        if not self.pieces or not self.pieces[-1].finish:
            self.pieces.append(self.choice.end(end))  # type: ignore[arg-type]
        self.content = "".join(piece.text for piece in self.pieces)
        self.thought = "".join(piece.reasoning for piece in self.pieces)
        self.finish = self.pieces[-1].finish
        self.unfinished = False
        arguments: list[list[str]] = []
        for call in (call for piece in self.pieces for call in piece.tool_calls):
            if call.name is not None:
                arguments.append([call.name, ""])
            arguments[call.index][1] += call.arguments
            self.unfinished = call.unfinished
        whole = arguments[: len(arguments) - self.unfinished]
        self.calls = [(name, json.loads(text)) for name, text in whole]


CASES: list[tuple[str, str, str, Calls]] = [
    (f"{THOUGHT}{FINAL}Hello!<|return|>", "Hello!", "Hm.", []),
    (f"{FINAL}Hello!", "Hello!", "", []),
    ("<|channel|>final <|constrain|>json<|message|>{}<|return|>", "{}", "", []),
    (f"<|start|>assistant{THOUGHT}{FINAL}Hello!<|return|>", "Hello!", "Hm.", []),
    (
        f"{THOUGHT}<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant"
        f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}"
        "<|call|>",
        "Let me see.",
        "Hm.",
        [WEATHER],
    ),
    (
        f"<|channel|>commentary<|message|>First.<|end|><|start|>assistant{THOUGHT}{THOUGHT}"
        f"{FINAL}Last.<|return|>",
        "First.\n\nLast.",
        "Hm.\n\nHm.",
        [],
    ),
    # Tools that the request did not offer
    (
        "<|channel|>analysis to=python code<|message|>print(1)<|call|>",
        "",
        "to=python print(1)",
        [],
    ),
    (
        "<|channel|>commentary to=functions.nobody <|constrain|>json<|message|>{}<|call|>",
        "to=functions.nobody {}",
        "",
        [],
    ),
    # Malformed
    ("<|channel|>mood<|message|>Hello!<|return|>", "Hello!", "", []),
    ("<|message|>Hello!<|return|>", "Hello!", "", []),
    ("Hello! How <|message|>are you?<|return|>", "Hello! How are you?", "", []),
    ("<|channel|>final Hello!<|return|>", "Hello!", "", []),
    (
        "<|channel|>analysis Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello!",
        "Hello!",
        "Hm.",
        [],
    ),
    (f"{THOUGHT}Hello!<|return|>", "Hello!", "Hm.", []),
    (f"{THOUGHT}final<|message|>Hello!<|return|>", "Hello!", "Hm.", []),
    ("analysis<|message|>Hm.<|end|>assistantfinal<|message|>Hello!", "Hello!", "Hm.", []),
    ("finally<|message|>, hello!", "finally, hello!", "", []),
    ("to=functions.get_weather or so<|return|>", "to=functions.get_weather or so", "", []),
    (f"<|channel|>analysis<|message|>Hm.{FINAL}Hello!<|return|>", "Hello!", "Hm.", []),
    (f"<|channel|>analysis<|message|>Hm.<|start|>assistant{FINAL}Hello!", "Hello!", "Hm.", []),
    (f"<|channel|>analysis<|message|>Hm.<|end|>{FINAL}Hello!", "Hello!", "Hm.", []),
    (f"<|channel|>analysis<|message|>Hm.<|end|>\nassistant{FINAL}Hello!", "Hello!", "Hm.", []),
    (f"<|channel|>analysis{FINAL}Hel<|constrain|>lo!<|return|>", "Hello!", "", []),
    (
        f"<|channel|>commentary to=functions.get_weather <|constrain|>json{ARGUMENTS}<|call|>",
        f"to=functions.get_weather {ARGUMENTS}",
        "",
        [],
    ),
    (f"{FINAL}Hello!<|end|><|start|>user<|message|>And you?<|end|>", "Hello!", "", []),
    ("final", "final", "", []),
    (" to", " to", "", []),
    ("<|constrain|><|constrain|>", "", "", []),
    ("", "", "", []),
]


@pytest.mark.parametrize(("text", "content", "thought", "calls"), CASES)
@pytest.mark.parametrize("early", [False, True], ids=["whole", "streamed"])
def test_F01_thoughts_answers_and_calls_are_sorted_by_channel(
    text: str, content: str, thought: str, calls: Calls, early: bool
) -> None:
    found = Read(ids_of(text), early_calls=early)
    assert (found.content, found.thought, found.calls) == (content, thought, calls)
    assert found.finish == ("tool_calls" if calls else "stop")


@pytest.mark.parametrize(("text", "content", "thought", "calls"), CASES)
def test_F01_every_split_of_the_text_is_read_alike(
    text: str, content: str, thought: str, calls: Calls
) -> None:
    for pieces in (list(text), *([text[:at], text[at:]] for at in range(len(text)))):
        for early in (False, True):
            tools = ToolCallParser(TOOLS, DIALECTS["harmony"])
            split = OutputParser(markers_of(TOKENIZER, True), tools=tools, early=early)
            for piece in pieces:
                split.feed(piece)
            split.end(complete=True)
            assert (split.content, split.reasoning) == (content, thought), pieces
            assert [call.name for call in split.calls if call.name] == [name for name, _ in calls]


def test_F01_text_comes_as_soon_as_it_is_written() -> None:
    """A token's text is held back only within a call and within headers."""
    for text, said in [
        (f"{THOUGHT}{FINAL}Hello, you", "Hello, you"),
        ("Hello, you", "Hello, you"),
        ("to=" + "x" * 200, "to=" + "x" * 200),
        ("<|channel|>commentary<|message|>Let", "Let"),
        ("<|channel|>commentary to=functions.nobody<|message|>{", "to=functions.nobody {"),
    ]:
        choice = ChoiceText(generation(), TOKENIZER, PROMPT, rid="r", choice=0)
        assert "".join(choice.feed(id).text for id in ids_of(text)) == said
    thinking = ChoiceText(generation(), TOKENIZER, PROMPT, rid="r", choice=0)
    text = "<|channel|>analysis<|message|>Hm"
    assert "".join(thinking.feed(id).reasoning for id in ids_of(text)) == "Hm"
    assert thinking.reasoning_tokens == len(ids_of("Hm"))


def test_F01_a_header_that_is_cut_off_is_no_text() -> None:
    for whole in (
        f"{THOUGHT}<|channel|>commentary to=functions.get_weather <|constrain|>json",
        f"{THOUGHT} to=functions.get_weather<|channel|>commentary json",
        " to=functions.get_weather<|channel|>commentary json",
    ):
        ids = ids_of(whole)
        for end in range(len(ids) + 1):
            found = Read(ids[:end], end="length")
            assert (found.content, found.calls, found.finish) == ("", [], "length")
            assert "Hm.".startswith(found.thought)


def test_F01_a_text_that_spells_markers_keeps_them() -> None:
    """The markers are special tokens, and a model that explains its format spells them."""
    explained = "Write <|start|>assistant<|channel|>final<|message|>, then <|end|> or <|call|>."
    spelled = vocabularies.in_pieces(explained, TOKENIZER)
    found = Read([*ids_of(FINAL), *spelled, *ids_of("<|return|>")])
    assert (found.content, found.thought) == (explained, "")
    found = Read([*ids_of("<|channel|>analysis<|message|>"), *spelled])
    assert (found.content, found.thought) == ("", explained)
    assert Read(spelled).content == explained
    ids = [*ids_of("<|channel|>commentary to=functions.get_weather<|message|>"), *spelled]
    assert Read(ids).content == f"to=functions.get_weather {explained}"


fragments = st.sampled_from(
    [*vocabularies.HARMONY_MARKERS, "analysis", "final", "commentary", " to=functions.get_time"]
) | st.sampled_from(["assistant", "user", " json", "{}", "Hello", " ", "<|", "to=python "])


@settings(deadline=None)
@given(st.lists(fragments, max_size=14), st.booleans())
def test_F01_no_answer_shows_a_marker(written: list[str], early: bool) -> None:
    found = Read(ids_of("".join(written)), early_calls=early)
    for marker in vocabularies.HARMONY_MARKERS:
        assert marker not in found.content + found.thought


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ('{"city": Paris}<|call|>', "stop"),
        ('{"city": "Paris"<|call|>', "stop"),
        ('["Paris"]<|call|>', "stop"),
        ('{"city": <|message|>"Paris"<|call|>', "stop"),
        ('{"city": "Paris"', "length"),
        ("", "length"),
    ],
)
def test_F01_a_call_that_cannot_be_read_is_none(text: str, end: str) -> None:
    header = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    found = Read(ids_of(header + text), end=end)
    plain = text.replace("<|call|>", "").replace("<|message|>", "")
    assert (found.content, found.calls) == (f"to=functions.get_weather {plain}", [])
    assert found.finish == end
    streamed = Read(ids_of(header + text), end=end, early_calls=True)
    assert streamed.finish == end
    assert streamed.calls == []


# The choice of the format


def test_F01_a_template_with_channels_is_harmonys() -> None:
    found = output_format(TOKENIZER)
    assert found.calls is DIALECTS["harmony"] and found.reasons
    markers = {VOCABULARY[marker] for marker in ("<|call|>", "<|return|>")}
    assert markers < set(TOKENIZER.eos_token_ids)
    assert VOCABULARY["<|end|>"] not in TOKENIZER.eos_token_ids


def test_F01_the_option_overrides_the_template() -> None:
    tokenizer = vocabularies.harmony("{{ messages }}")
    choose_format(tokenizer, "none")
    assert output_format(tokenizer).framing.guide is None
    choose_format(tokenizer, "gpt_oss")
    assert output_format(tokenizer).framing is HARMONY
    tokenizer = vocabularies.harmony(answer_templates.HARMONY + "{{ '' }}")
    choose_format(tokenizer, "none")
    assert (output_format(tokenizer).calls, output_format(tokenizer).framing) == (None, HARMONY)


# The answer's parts in requests


def test_F01_stop_strings_end_the_answer_alone() -> None:
    ending = Ending(stop=("Paris",))
    text = f"<|channel|>analysis<|message|>Paris, I think.<|end|><|start|>assistant{FINAL}In Paris."
    found = Read(ids_of(text), ending=ending)
    assert (found.content, found.thought, found.finish) == ("In ", "Paris, I think.", "stop")
    parted = Read(
        ids_of(f"<|channel|>commentary<|message|>A<|end|><|start|>assistant{FINAL}B"),
        ending=Ending(stop=("\n\n",)),
    )
    assert (parted.content, parted.choice.stop) == ("A\n\nB", None)


def test_F01_tokens_of_headers_are_not_the_answers() -> None:
    text = f"{THOUGHT}<|channel|>commentary<|message|>One.<|end|><|start|>assistant{FINAL}Two."
    ids = ids_of(text)
    found = Read(ids)
    shown = [TOKENIZER.decode([id]) for id, p in zip(ids, found.protocol, strict=True) if not p]
    assert "".join(shown) == "Hm.One.Two."


def test_F01_without_tools_a_call_is_text() -> None:
    text = f"<|channel|>commentary to=functions.get_weather<|message|>{ARGUMENTS}<|call|>"
    for prompt in (ChatPrompt(()), ChatPrompt((), TOOLS, tool_choice="none")):
        found = Read(ids_of(text), prompt=prompt)
        assert (found.content, found.calls) == (f"to=functions.get_weather {ARGUMENTS}", [])


# Answers that a grammar guides

GRAMMARS = GrammarCompiler(TOKENIZER, WIDTH)
COLOUR = Constraint("json_schema", json.dumps(record(a=COLOURS)))
REQUIRED = ChatPrompt((), TOOLS, tool_choice="required")
CALL_HEADERS = (
    "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>",
    " to=functions.get_weather<|channel|>commentary json<|message|>",
)


@pytest.mark.parametrize("before", [THOUGHT, ""])
@pytest.mark.parametrize("header", [FINAL, "<|channel|>final <|constrain|>json<|message|>"])
def test_F01_a_grammar_holds_for_the_final_message(before: str, header: str) -> None:
    compiled = GRAMMARS.compile(COLOUR)
    answer = '{"a":"red"}'
    assert accepts(compiled, before + header + answer, TOKENIZER)
    assert not accepts(compiled, answer, TOKENIZER)
    assert not accepts(compiled, before + header + "red", TOKENIZER)
    ids = [*ids_of(before + header + answer), VOCABULARY["<|return|>"]]
    found = Read(ids, constraint=COLOUR)
    assert (found.content, found.thought) == (answer, "Hm." if before else "")


@pytest.mark.parametrize("before", [THOUGHT, ""])
@pytest.mark.parametrize("header", CALL_HEADERS)
@pytest.mark.parametrize("parser", ["auto", "none"])
def test_F01_a_required_call_is_a_message(before: str, header: str, parser: str) -> None:
    compiled = GRAMMARS.tools(REQUIRED)
    arguments = '{"city":"Paris","days":3}'
    assert accepts(compiled, before + header + arguments, TOKENIZER)
    assert not accepts(compiled, before + FINAL + "Hello", TOKENIZER)
    assert not accepts(compiled, before + header + '{"city":3}', TOKENIZER)
    other = replace(REQUIRED, forced_tool="get_time")
    assert not accepts(GRAMMARS.tools(other), before + header + arguments, TOKENIZER)
    choose_format(TOKENIZER, parser)
    try:
        found = Read(ids_of(before + header + arguments), prompt=REQUIRED)
    finally:
        choose_format(TOKENIZER)
    assert (found.calls, found.content, found.finish) == ([WEATHER], "", "tool_calls")


def test_F01_guided_answers_go_on_from_the_prompt() -> None:
    thought = GRAMMARS.compile(COLOUR, in_reasoning=True)
    assert accepts(thought, f'm.<|end|><|start|>assistant{FINAL}{{"a":"red"}}', TOKENIZER)
    assert accepts(GRAMMARS.compile(COLOUR, in_answer=True), '{"a":"red"}', TOKENIZER)
    called = GRAMMARS.tools(replace(REQUIRED, forced_tool="get_time"), in_answer=True)
    header = CALL_HEADERS[0].replace("get_weather", "get_time")
    assert accepts(called, f"<|end|><|start|>assistant{header}{{}}", TOKENIZER)


# Prompts


def rendered(*messages: dict[str, Any], **fields: Any) -> RenderedPrompt:
    prompt = ChatPrompt(({"role": "user", "content": "Hi"}, *messages), **fields)
    return render(prompt, TOKENIZER, WIDTH)


def said(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", **fields}


def test_F01_an_answer_goes_on_where_the_prompt_ends() -> None:
    asked = rendered()
    assert (asked.in_answer, asked.in_reasoning, asked.header) == (False, False, "assistant")
    assert Read(ids_of(f"{FINAL}Yes"), rendered=asked).content == "Yes"
    begun = rendered(said(content="Yes"), add_generation_prompt=False, continue_final_message=True)
    assert begun.in_answer
    assert Read(ids_of(", sir."), rendered=begun).content == ", sir."


def test_F01_efforts_that_the_model_does_not_know_become_the_nearest() -> None:
    for asked, known in [("low", "low"), ("minimal", "low"), ("none", "low"), ("max", "high")]:
        ids = rendered(template_kwargs={"reasoning_effort": asked}).ids
        assert f"Reasoning: {known}<|end|>" in TOKENIZER.decode(ids)


def test_F01_markers_that_an_answer_spells_are_text_in_the_next_prompt() -> None:
    explained = f"It begins with {FINAL}, I think.<|end|>"
    fields = {"reasoning_content": explained, "tool_calls": []}
    asked = rendered(said(content=explained, **fields), {"role": "user", "content": "And then?"})
    assert explained in TOKENIZER.decode(asked.ids)
    assert asked.ids.count(VOCABULARY["<|channel|>"]) == 1


def test_F01_the_turn_after_a_call_begins_like_the_call() -> None:
    """The thought before it is in the prompt again, token for token."""
    first = rendered(tools=TOOLS)
    call = CALL_HEADERS[1] + '{"city": "Paris", "days": 3}<|call|>'
    answer = ids_of(THOUGHT + call)
    found = Read(answer)
    calls = [
        {"id": f"c{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for n, (name, arguments) in enumerate([*found.calls, *found.calls])
    ]
    results = [
        {"role": "tool", "tool_call_id": c["id"], "content": f"result {c['id']}"} for c in calls
    ]
    message = said(reasoning_content=found.thought, tool_calls=calls[:1])
    second = rendered(message, results[0], tools=TOOLS)
    assert second.ids[: len(first.ids) + len(answer)] == [*first.ids, *answer]
    both = rendered(said(reasoning_content="Hm.", tool_calls=calls), *results, tools=TOOLS)
    text = TOKENIZER.decode(both.ids)
    assert [
        text.count(part) for part in ("to=functions.get_weather", "result c0", "result c1")
    ] == [2, 1, 1]
    beside = rendered(message | {"content": "Let me see."}, results[0], tools=TOOLS)
    assert "Hm.\n\nLet me see.<|end|>" in TOKENIZER.decode(beside.ids)


# Against openai-harmony 0.0.8, whose parser found these messages: channel, recipient and text

RECORDED: list[tuple[str, list[tuple[str, str | None, str]]]] = [
    (
        "<|channel|>commentary<|message|>  lead<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Hm.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>to=functions.x<|end|>",
        [("commentary", None, "  lead"), ("final", None, "Hm."), ("final", None, "to=functions.x")],
    ),
    (
        "<|channel|>final <|constrain|>json<|message|>  lead<|end|>"
        "<|start|>assistant<|channel|>final<|message|>  lead<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>Hello!\n\n- a\n- b<|return|>",
        [
            ("final", None, "  lead"),
            ("final", None, "  lead"),
            ("commentary", None, "Hello!\n\n- a\n- b"),
        ],
    ),
    (
        ' to=functions.get_time<|channel|>commentary<|message|>{\n  "city": "x\\n"\n}<|call|>'
        "<|start|>assistant<|channel|>final <|constrain|>json<|message|>analysis<|end|>",
        [
            ("commentary", "functions.get_time", '{\n  "city": "x\\n"\n}'),
            ("final", None, "analysis"),
        ],
    ),
    (
        "<|channel|>commentary<|message|>trail \n<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>analysis<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>  lead<|end|>",
        [
            ("commentary", None, "trail \n"),
            ("commentary", None, "analysis"),
            ("analysis", None, "  lead"),
        ],
    ),
    (
        "<|channel|>analysis to=functions.get_weather code<|message|>{}<|call|>"
        "<|start|>assistant<|channel|>final <|constrain|>json<|message|><|",
        [("analysis", "functions.get_weather", "{}"), ("final", None, "<|")],
    ),
    (
        "<|channel|>commentary<|message|>to=functions.x<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Hm.<|end|>",
        [("commentary", None, "to=functions.x"), ("final", None, "Hm.")],
    ),
    (
        "<|channel|>analysis<|message|>  lead<|end|>"
        "<|start|>assistant<|channel|>final<|message|>trail \n<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Hm.<|end|>",
        [("analysis", None, "  lead"), ("final", None, "trail \n"), ("final", None, "Hm.")],
    ),
    (
        "<|channel|>final <|constrain|>json<|message|><b>x</b><|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>to=functions.x<|return|>",
        [("final", None, "<b>x</b>"), ("analysis", None, "to=functions.x")],
    ),
]


@pytest.mark.parametrize(("text", "messages"), RECORDED)
def test_F01_messages_are_those_that_openais_parser_finds(
    text: str, messages: list[tuple[str, str | None, str]]
) -> None:
    calls = [(to.removeprefix("functions."), said) for _, to, said in messages if to]
    texts = [(channel, said) for channel, to, said in messages if said and not to]
    thoughts = [said for channel, said in texts if channel == "analysis"]
    contents = [said for channel, said in texts if channel != "analysis"]
    found = Read(ids_of(text), early_calls=True)
    assert found.content == "\n\n".join(contents)
    assert found.thought == "\n\n".join(thoughts)
    assert found.calls == [(name, json.loads(arguments)) for name, arguments in calls]
