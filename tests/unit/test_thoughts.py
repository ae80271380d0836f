"""Thoughts in the form of each family, told apart from answers and calls."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mayfly_protocol.requests import (
    ChatPrompt,
    Constraint,
    Ending,
    Generation,
    Output,
    Sampling,
)
from mayfly_worker.grammar.compiler import GrammarCompiler
from mayfly_worker.text.choice import ChoiceText, TextPiece
from mayfly_worker.text.dialects.dialect import REASONING, Framing, Thought
from mayfly_worker.text.dialects.families import DIALECTS
from mayfly_worker.text.dialects.registry import choose_format, output_format, thought_named
from mayfly_worker.text.dialects.thoughts import THOUGHTS_IN_ORDER
from mayfly_worker.text.markers import markers_of
from mayfly_worker.text.output_parser import OutputParser
from mayfly_worker.text.prompts import RenderedPrompt, render
from mayfly_worker.text.tool_calls import ToolCallParser
from support import vocabularies
from support.call_samples import THOUGHT_SAMPLES, TOOLS, Calls, Sample
from support.grammar import END, allowed

USER = {"role": "user", "content": "What is <think>, [THINK] and <thought>?"}
NAMES = [f"{at}-{sample.thought}" for at, sample in enumerate(THOUGHT_SAMPLES)]


def tokenizer_of(sample: Sample, *, special: bool = False) -> Any:
    return vocabularies.with_parser(
        sample.dialect, special=special, thought=sample.thought, in_prompt=sample.in_prompt
    )


def prompt_of(sample: Sample, **options: Any) -> RenderedPrompt:
    return render(ChatPrompt((USER,), TOOLS, **options), tokenizer_of(sample), 10**6)


def read(
    sample: Sample, pieces: list[str], state: str | None, *, early: bool
) -> tuple[str, str, Calls]:
    tools = ToolCallParser(TOOLS, DIALECTS[sample.dialect])
    split = OutputParser(
        markers_of(tokenizer_of(sample), True), state=state, tools=tools, early=early
    )
    for piece in pieces:
        split.feed(piece)
    split.end(complete=True)
    assert not split.broken
    found: list[list[str]] = []
    for piece in split.calls:
        if piece.name is not None:
            found.append([piece.name, ""])
        found[-1][1] += piece.arguments
    calls = [(name, json.loads(arguments)) for name, arguments in found]
    return split.reasoning, split.content, calls


@pytest.mark.parametrize("early", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("sample", THOUGHT_SAMPLES, ids=NAMES)
def test_F03_every_split_gives_thought_answer_and_calls(sample: Sample, early: bool) -> None:
    text = sample.text
    state = REASONING if prompt_of(sample).in_reasoning else None
    meant = (sample.reasoning, sample.content, sample.calls)
    for pieces in ([text], list(text), *([text[:at], text[at:]] for at in range(1, len(text)))):
        assert read(sample, pieces, state, early=early) == meant, pieces


@pytest.mark.parametrize("special", [False, True], ids=["ordinary", "special"])
@pytest.mark.parametrize("sample", THOUGHT_SAMPLES, ids=NAMES)
def test_F03_tokens_give_thought_answer_and_calls(sample: Sample, special: bool) -> None:
    """Marks are single tokens, special ones of the vocabulary or not, or ordinary text."""
    tokenizer = tokenizer_of(sample, special=special)
    rendered = prompt_of(sample)
    for early in (False, True):
        generation = Generation(
            "m",
            ChatPrompt((USER,), TOOLS),
            Sampling(seed=0),
            Ending(),
            Output(split=True, early_calls=early),
        )
        one = ChoiceText(generation, tokenizer, rendered, rid="r", choice=0)
        ids = vocabularies.ids_of(sample.text, tokenizer)
        pieces = [*map(one.feed, ids), one.end("stop")]
        assert "".join(piece.reasoning for piece in pieces) == sample.reasoning
        assert "".join(piece.text for piece in pieces) == sample.content
        named = [call.name for piece in pieces for call in piece.tool_calls if call.name]
        assert named == [name for name, _ in sample.calls]
        assert pieces[-1].finish == ("tool_calls" if sample.calls else "stop")


@pytest.mark.parametrize("form", THOUGHTS_IN_ORDER, ids=lambda form: form.name)
def test_F03_a_thought_that_never_ends_is_no_answer(form: Thought) -> None:
    sample = Sample("json_tools", f"{form.start}Hm. So", [], "", form.name)
    tokenizer = tokenizer_of(sample)
    generation = Generation(
        "m", ChatPrompt((USER,)), Sampling(seed=0), Ending(), Output(split=True)
    )
    one = ChoiceText(generation, tokenizer, prompt_of(sample), rid="r", choice=0)
    ids = vocabularies.ids_of(sample.text, tokenizer)
    whole = TextPiece()
    for piece in [*map(one.feed, ids), one.end("length")]:
        whole = whole.joined(piece)
    assert whole == TextPiece("", "Hm. So", (), "length")


@pytest.mark.parametrize("form", THOUGHTS_IN_ORDER, ids=lambda form: form.name)
def test_F03_an_answer_in_a_form_follows_its_thought(form: Thought) -> None:
    """Whatever the marks of the thought are made of, and whichever of them the model writes."""
    for special in (False, True):
        tokenizer = vocabularies.with_parser("json_tools", special=special, thought=form.name)
        grammars = GrammarCompiler(tokenizer, 2100)
        compiled = [
            grammars.compile(Constraint("json_schema", '{"type": "integer"}'), in_reasoning=True),
            grammars.tools(ChatPrompt((), TOOLS[1:]), in_reasoning=True),
        ]
        for end in form.ends:
            for grammar, answer in zip(
                compiled, ("7", '[{"name":"get_time","arguments":{}}]'), strict=True
            ):
                matcher = grammar.matcher()
                matcher.replay(vocabularies.ids_of(f"Hm. {{[{end}", tokenizer))
                assert END not in allowed(matcher, 2100)
                matcher.replay(vocabularies.ids_of(answer, tokenizer))
                assert END in allowed(matcher, 2100)


# The choice of a form

TEMPLATES = {
    "[THINK]{{ x }}[/THINK]": "mistral",
    "<|START_THINKING|>{{ x }}<|END_THINKING|>": "command_a",
    "{%- set begin = '<seed:think>' %}{%- set end = '</seed:think>' %}": "seed_oss",
    "{%- set i = '<|inner_prefix|>' %}{%- set o = '<|inner_suffix|>' %}": "apertus",
    "<mm:think></mm:think>": "minimax_m3",
    "{{ '<|channel>thought\n<channel|>' }}": "gemma4",
    "<|think:start|><|think:end|>": "solar_open2",
    "{%- set begin = '<think{}>'.format(':opensource') %}{{ '</think{}>' }}": "hy_v3",
    "Here are my reasoning steps:\n[BEGIN FINAL RESPONSE] <thinking>": "apriel",
    "Write your thoughts after 'Here is my thought process:'": "granite",
    "between <think></think> and write your response between <response></response>": "granite",
    "<think>{{ x }}</think><answer>{{ y }}</answer>": "hunyuan_a13b",
    "<think>{{ x }}</think>": "think",
    "{{ content.split('</think>')[-1] }}": "think",
    "<think>{{ x }}</think>{{ '\n<response>' }}": "think",
    "{{ '<thought>\n' }}{{ content.split('</thought>')[-1] }}": "exaone_deep",
    "<reasoning>...</reasoning><answer>...</answer>": "reasoning",
    "<thinking>{{ x }}</thinking>": "thinking",
    "<|think|><|content|><|tool_call:args|>": "solar_open",
    "no thoughts": "",
}


def test_F03_the_words_of_a_template_choose_the_form() -> None:
    for template, name in TEMPLATES.items():
        tokenizer = vocabularies.byte_level("plain", template)
        assert output_format(tokenizer).reasoning_parser == name, template


def test_F03_tokens_choose_the_form_where_no_template_does() -> None:
    assert output_format(vocabularies.byte_level("thinking", "{{ x }}")).reasoning_parser == "think"


def test_F03_marks_that_are_no_tokens_count_at_the_beginning_only() -> None:
    for kind, leading in (("thinking", False), ("special", False), ("plain", True)):
        thought = output_format(vocabularies.thinking_with(kind)).thought
        assert thought is not None and thought.leading is leading


def test_every_name_and_alias_means_one_form() -> None:
    forms = [form for form in THOUGHTS_IN_ORDER for _ in (form.name, *form.aliases)]
    names = [name for form in THOUGHTS_IN_ORDER for name in (form.name, *form.aliases)]
    assert len(set(names)) == len(names)
    for form, name in zip(forms, names, strict=True):
        assert thought_named(name) is thought_named(name.replace("_", "-")) is form
    assert thought_named("none") is None
    assert isinstance(thought_named("gpt-oss"), Framing)
    with pytest.raises(
        ValueError, match="reasoning_parser: there is no 'hm'; there are auto, none, ap"
    ):
        thought_named("hm")


def test_none_leaves_thoughts_in_the_text() -> None:
    tokenizer = vocabularies.byte_level("thinking", "<think></think> ")
    choose_format(tokenizer, reasoning_parser="none")
    assert not output_format(tokenizer).reasons
    split = OutputParser(markers_of(tokenizer, False))
    split.feed("<think>Hm.</think>Yes.")
    split.end(complete=True)
    assert (split.content, split.reasoning) == ("<think>Hm.</think>Yes.", "")


# Thoughts that the prompt begins


def test_F03_only_what_a_template_adds_begins_a_thought() -> None:
    """Marks in a question do not, whether they are tokens or not; nor do those that the template
    closes."""
    for name, ends in {
        "think": {"": False, "<think>\n": True, "<think>\n\n</think>\n": False},
        "deepseek_r1": {"": True, "<think>\n": True, "<think></think>": False},
        "exaone_deep": {"": False, "<thought>\n": True},
        "mistral": {"": False, "[THINK]": True},
    }.items():
        for end, begun in ends.items():
            sample = Sample("json_tools", "", [], thought=name, in_prompt=end)
            assert prompt_of(sample).in_reasoning is begun, (name, end)
    sample = Sample("json_tools", "", [], thought="think", in_prompt="<think>\n")
    rendered = prompt_of(sample, add_generation_prompt=False)
    assert not rendered.in_reasoning
