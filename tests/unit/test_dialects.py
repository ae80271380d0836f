"""Output dialects: texts as models of each family write them, with the calls that are meant."""

from __future__ import annotations

import json

import pytest

from mayfly_protocol.requests import ChatPrompt, Ending, Generation, Output, Sampling
from mayfly_protocol.serving import ToolCallDelta
from mayfly_worker.text.choice import ChoiceText, TextPiece
from mayfly_worker.text.dialects.families import DIALECTS
from mayfly_worker.text.dialects.markup_readers import MARKUPS
from mayfly_worker.text.dialects.registry import (
    dialect_named,
    output_format,
)
from mayfly_worker.text.markers import markers_of
from mayfly_worker.text.output_parser import OutputParser
from mayfly_worker.text.prompts import RenderedPrompt, render
from mayfly_worker.text.tool_calls import ToolCallParser
from support import vocabularies
from support.call_samples import PARIS, SAMPLES, TOOLS, Calls, Sample

CALL = '{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}'
NAMES = [f"{at}-{sample.dialect}" for at, sample in enumerate(SAMPLES)]

TEXTS = [
    ("llama3_json", '{"city": "Paris", "days": 3}'),
    ("llama3_json", '{"name": "Alice", "age": 3}'),
    ("llama3_json", '{"name": "get_weather"}'),
    ("llama3_json", '{"name": "nobody", "parameters": {}}'),
    ("llama3_json", '{"name": "get_weather", "description": "Asks.", "parameters": {}}'),
    ("llama3_json", f"The call is {CALL}"),
    ("llama3_json", "{not json"),
    ("llama3_json", "<|python_tag|>print(3)"),
    ("llama3_json", " \n"),
    ("llama4_pythonic", "[the page](https://example.org)"),
    ("llama4_pythonic", "[1, 2]"),
    ("llama4_pythonic", "[nobody(city='x')]"),
    ("llama4_pythonic", "[get_weather('Paris')]"),
    ("llama4_pythonic", "See [get_time()]"),
    ("command_r", "Action: none."),
    ("phi4_mini", "functools is a module."),
    ("phi4_mini", "functools[0]"),
    ("granite", "<|tool_call|>[]"),
    ("granite", '<|tool_call|>[{"name": "nobody", "arguments": {}}]'),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>nothing<｜tool▁calls▁end｜>"),
    ("deepseek_v32", "<｜DSML｜function_calls>\nnothing\n</｜DSML｜function_calls>"),
    ("apertus", '<|tools_prefix|>[{"nobody": {}}]<|tools_suffix|>'),
    ("olmo3", "<function_calls>\nx = get_time()\n</function_calls>"),
    ("json_tools", f"<tool_call>and {CALL}</tool_call>"),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", "[TOOL_CALLS]get_weather[ARGS]nothing"),
    ("longcat", "<longcat_tool_call>nobody</longcat_tool_call>"),
]
"""Texts that merely look like calls."""


def parser(dialect: str, *, early: bool) -> OutputParser:
    found = markers_of(vocabularies.with_parser(dialect), True)
    tools = ToolCallParser(TOOLS, DIALECTS[dialect])
    return OutputParser(found, tools=tools, early=early)


def read(dialect: str, pieces: list[str], *, early: bool) -> tuple[str, Calls]:
    split = parser(dialect, early=early)
    for piece in pieces:
        split.feed(piece)
    split.end(complete=True)
    assert not split.broken
    found: list[list[str]] = []
    for piece in split.calls:
        if piece.name is not None:
            found.append([piece.name, ""])
        found[-1][1] += piece.arguments
    return split.content, [(name, json.loads(arguments)) for name, arguments in found]


@pytest.mark.parametrize("early", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("sample", SAMPLES, ids=NAMES)
def test_F02_F07_F08_every_split_gives_the_calls_that_were_meant(
    sample: Sample, early: bool
) -> None:
    text = sample.text
    splits = [[text], list(text), *([text[:at], text[at:]] for at in range(1, len(text)))]
    for pieces in splits:
        found = read(sample.dialect, pieces, early=early)
        assert found == (sample.content, sample.calls), pieces


@pytest.mark.parametrize("early", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("dialect", "text"), TEXTS)
def test_F02_F07_F08_a_text_that_merely_looks_like_a_call_stays(
    dialect: str, text: str, early: bool
) -> None:
    for pieces in ([text], list(text), [text[: len(text) // 2], text[len(text) // 2 :]]):
        assert read(dialect, pieces, early=early) == (text, [])


@pytest.mark.parametrize(
    "name", sorted(set(MARKUPS) - {"deepseek_v32", "longcat", "minicpm5", "minimax_m2"})
)
def test_F07_an_argument_without_its_end_is_no_argument(name: str) -> None:
    """Nor is the call made without it."""
    closed = MARKUPS[name].closed
    sample = next(sample for sample in SAMPLES if sample.dialect == name and sample.calls == PARIS)
    at = sample.text.index(closed)
    for text in (
        sample.text[:at] + sample.text[at + len(closed) :],
        sample.text.replace(closed, ""),
    ):
        content, calls = read(name, [text], early=False)
        assert not any(len(arguments) < 2 for _, arguments in calls), text
        assert calls or content == text


def pieces_of(
    dialect: str, ids: list[int], *, special: bool, early: bool
) -> tuple[list[TextPiece], list[ToolCallDelta]]:
    output = Output(split=True, early_calls=early)
    generation = Generation("m", ChatPrompt((), TOOLS), Sampling(seed=0), Ending(), output)
    tokenizer = vocabularies.with_parser(dialect, special=special)
    one = ChoiceText(generation, tokenizer, RenderedPrompt([0]), rid="r", choice=0)
    pieces = [*map(one.feed, ids), one.end("stop")]
    return pieces, [call for piece in pieces for call in piece.tool_calls]


@pytest.mark.parametrize("special", [False, True], ids=["ordinary", "special"])
@pytest.mark.parametrize("sample", SAMPLES, ids=NAMES)
def test_F02_F07_F08_tokens_give_the_calls_that_were_meant(sample: Sample, special: bool) -> None:
    """Markers are single tokens, special ones of the vocabulary or not."""
    ids = vocabularies.ids_of(
        sample.text, vocabularies.with_parser(sample.dialect, special=special)
    )
    for early in (False, True):
        pieces, deltas = pieces_of(sample.dialect, ids, special=special, early=early)
        calls: list[list[str]] = []
        for delta in deltas:
            assert delta.index == len(calls) - (delta.name is None)
            if delta.name is not None:
                calls.append([delta.name, ""])
            calls[-1][1] += delta.arguments
        assert [(name, json.loads(arguments)) for name, arguments in calls] == sample.calls
        assert "".join(piece.text for piece in pieces) == sample.content
        assert pieces[-1].finish == "tool_calls"


def test_F02_text_is_sent_as_soon_as_it_is_no_call() -> None:
    """An answer of JSON must not wait for its end because a call could begin like it."""
    for dialect, begun in [
        ("llama3_json", '{"city":'),
        ("llama3_json", "{not"),
        ("llama3_json", '{"name": "Alice", '),
        ("llama4_pythonic", "[the page]"),
        ("command_r", "Actions"),
        ("phi4_mini", "functools."),
        ("json_tools", "Write <tool_call> f"),
        ("granite", "<|tool_call|>f"),
    ]:
        split = parser(dialect, early=True)
        for character in begun:
            split.feed(character)
        assert split.content == begun


def test_F02_a_call_without_a_marker_is_one_after_the_thought_too() -> None:
    tokenizer = vocabularies.byte_level("thinking")
    found = markers_of(tokenizer, True)
    split = OutputParser(found, tools=ToolCallParser(TOOLS, DIALECTS["llama3_json"]))
    split.feed(f"\n<think>hm</think>\n{CALL}")
    split.end(complete=True)
    assert (split.content, split.reasoning) == ("", "hm")
    assert [piece.name for piece in split.calls] == ["get_weather"]


def test_a_models_own_id_comes_with_its_call() -> None:
    for dialect, text, id in [
        ("mistral", "[TOOL_CALLS]get_time[CALL_ID]abcdefghi[ARGS]{}", "abcdefghi"),
        (
            "kimi_k2",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_time:4"
            "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
            "functions.get_time:4",
        ),
    ]:
        for early in (False, True):
            split = parser(dialect, early=early)
            for character in text:
                split.feed(character)
            split.end(complete=True)
            assert [(c.name, c.id) for c in split.calls if c.name] == [("get_time", id)]


def test_F02_parts_of_solar_opens_answers_have_headers() -> None:
    template = "{{ tools }}<|begin|>assistant<|think|><|content|><|tool_call:args|>"
    tokenizer = vocabularies.byte_level("plain", template)
    text = (
        "<|think|>Hm.<|end|><|begin|>assistant<|content|>Yes.<|end|><|begin|>assistant"
        "<|tool_calls|><|tool_call:begin|>a1<|tool_call:name|>get_time<|tool_call:args|>{}"
        "<|tool_call:end|><|calls|>"
    )
    for pieces in ([text], list(text)):
        tools = ToolCallParser(TOOLS, DIALECTS["solar_open"])
        split = OutputParser(markers_of(tokenizer, True), tools=tools)
        for piece in pieces:
            split.feed(piece)
        split.end(complete=True)
        assert (split.reasoning, split.content) == ("Hm.", "Yes.")
        assert [(call.name, call.id) for call in split.calls] == [("get_time", "a1")]
    split = OutputParser(markers_of(tokenizer, False))
    split.feed(text[: text.index("<|tool_calls|>")])
    split.end(complete=True)
    assert (split.reasoning, split.content) == ("Hm.", "Yes.")


def test_F02_an_answer_of_solar_open_goes_on_where_the_prompt_ends() -> None:
    template = (
        "{% for message in messages %}<|begin|>{{ message.role }}<|content|>{{ message.content }}"
        "<|end|>{% endfor %}{% if add_generation_prompt %}<|begin|>assistant{% endif %}"
        "{% if false %}<|think|><|tool_call:args|>{% endif %}"
    )
    tokenizer = vocabularies.byte_level("plain", template)
    messages = ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Wel"})
    for fields, text, content in [
        ({"add_generation_prompt": False, "continue_final_message": True}, "come.", "come."),
        ({}, "<|think|>Hm.<|end|><|begin|>assistant<|content|>Welcome.", "Welcome."),
    ]:
        prompt = ChatPrompt(messages[: 1 + len(fields)], **fields)  # type: ignore[arg-type]
        rendered = render(prompt, tokenizer, 5000)
        generation = Generation("m", prompt, Sampling(seed=0), Ending(), Output(split=True))
        choice = ChoiceText(generation, tokenizer, rendered, rid="r", choice=0)
        ids = vocabularies.ids_of(text, tokenizer)
        assert "".join(choice.feed(id).text for id in ids) + choice.end("stop").text == content


# The choice of a dialect

TEMPLATES = {
    "{% if tools %}<tool_call>{{ tool_call.name }}</tool_call>{% endif %}": "json_tools",
    'like <tool_call>{\\"name\\": f, \\"arguments\\": {...}}</tool_call> {{ tools }}': "json_tools",
    "{{ '<tool_call>\\n<function=' + name + '>' }}": "qwen3_coder",
    "<tool_call>\n<function=f>": "qwen3_coder",
    "<tool_call>{{ tool_call.name }}<arg_key>k</arg_key>": "glm47",
    "{{ '<seed:tool_call>\\n<function=' + tool_call.name }}": "seed_oss",
    "<minimax:tool_call>": "minimax_m2",
    "<|tool_call>call:f{}<tool_call|>": "gemma4",
    "<start_function_call>": "function_gemma",
    "<longcat_tool_call>": "longcat",
    "<|tool_list_start|>": "pythonic",
    "<|tool_call_start|>": "pythonic",
    "<|tool_calls_section_begin|>": "kimi_k2",
    '<function name="f"><param name="k">': "minicpm5",
    "[TOOL_CALLS]": "mistral",
    "<atem:function_calls>": "muse_spark",
    'Respond in the format {"name": function name, "parameters": a dictionary}': "llama3_json",
    "{{ '<|python_tag|>' + tool_call.name + '.call(' }}": "llama3_json",
    "Use exact format: [func_name1(param1=value1), func_name2(...)]": "llama4_pythonic",
    "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] }}": "deepseek_v3",
    "{% set dsml_token = '｜DSML｜' %}<{{ dsml_token }}function_calls>": "deepseek_v32",
    "<|start_of_role|>available_tools<|end_of_role|>{{ tools }}": "granite",
    "respond with <|tool_call|> followed by a JSON list of tools used": "granite",
    "<|function_call_library|>": "granite_20b",
    "<|tool|>{{ tools | tojson }}<|/tool|>": "phi4_mini",
    "prefix function calls with functools[...]": "phi4_mini",
    '<|START_ACTION|>[{"tool_name": 1}]<|END_ACTION|>': "command_a",
    'Action: ```json [{"tool_name": title of the tool}]```': "command_r",
    "<TOOLCALL>[...]</TOOLCALL>": "nemotron_nano_v2",
    "<tool_calls>[{...}]</tool_calls>": "hunyuan",
    "<|action_start|><|plugin|>": "internlm2",
    "{% set tool_calls_token = '<|tools_prefix|>' %}": "apertus",
    "<function_calls>\nf()\n</function_calls>": "olmo3",
    "function call<|role_sep|>": "gigachat3",
    "<|tool_call:begin|>ID<|tool_call:name|>f<|tool_call:args|>{}<|tool_call:end|>": "solar_open",
    "{% set mark = ']<]minimax[>[' %}{{ mark ~ '<tool_call>' }}{{ tool_call.name }}": "minimax_m3",
    "reply with <{start_tag}={function_name}>{parameters}{end_tag} <|python_tag|>": "functionary",
    "{{ tools }}": None,
    "no tools here": "json_tools",
}


def test_F02_the_words_of_a_template_choose_the_dialect() -> None:
    for template, name in TEMPLATES.items():
        tokenizer = vocabularies.byte_level("plain", template)
        chosen = output_format(tokenizer).calls
        assert (chosen.name if chosen else None) == name, template
        # mlx-lm's own choice, where it makes one, is never another form.
        kept = str(getattr(tokenizer.tool_parser, "__module__", "")).rpartition(".")[2]
        assert kept in ("", name) or name == "minimax_m3", template


def test_every_name_and_alias_means_one_dialect() -> None:
    names = [name for dialect in DIALECTS.values() for name in (dialect.name, *dialect.aliases)]
    assert len(set(names)) == len(names)
    for name in names:
        dialect = dialect_named(name)
        assert dialect is not None and name in (dialect.name, *dialect.aliases)
    assert dialect_named("none") is None


def test_F02_calls_that_a_request_demands_are_read_without_a_dialect() -> None:
    """And where the token limit cuts one, the answer does not end as if all were made."""
    tokenizer = vocabularies.byte_level("plain", "{{ tools }}")
    assert output_format(tokenizer).calls is None
    prompt = ChatPrompt((), TOOLS, tool_choice="required")
    for early in (False, True):
        for text, finish in [
            ('[{"name": "get_time", "arguments": {}}]', "tool_calls"),
            ('[{"name": "get_time", "arguments": {}}, {"name":', "length"),
        ]:
            output = Output(split=True, early_calls=early)
            generation = Generation("m", prompt, Sampling(seed=0), Ending(), output)
            one = ChoiceText(generation, tokenizer, RenderedPrompt([0]), rid="r", choice=0)
            pieces = [*map(one.feed, vocabularies.ids_of(text, tokenizer)), one.end("length")]
            calls = [call for piece in pieces for call in piece.tool_calls]
            assert "".join(call.arguments for call in calls) == "{}"
            assert pieces[-1].finish == finish
