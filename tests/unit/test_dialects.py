"""Output dialects: texts as models of each family write them, with the calls that are meant."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest

from mayfly_protocol.requests import ChatPrompt, Ending, Generation, Output, Sampling
from mayfly_protocol.serving import ToolCallDelta
from mayfly_worker.text.choice import ChoiceText, TextPiece
from mayfly_worker.text.dialects.registry import (
    DIALECTS,
    dialect_named,
    output_format,
    template_takes_tools,
)
from mayfly_worker.text.markers import markers_of
from mayfly_worker.text.output_parser import OutputParser
from mayfly_worker.text.prompts import RenderedPrompt
from mayfly_worker.text.tool_calls import ToolCallParser
from support import vocabularies


def _tool(name: str, **properties: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {k: {"type": t} for k, t in properties.items()}}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = (_tool("get_weather", city="string", days="integer"), _tool("get_time"))

Calls = list[tuple[str, dict[str, Any]]]
PARIS: Calls = [("get_weather", {"city": "Paris", "days": 3})]
TIME: Calls = [("get_time", {})]


class Sample(NamedTuple):
    dialect: str
    text: str
    calls: Calls
    content: str = ""


_JSON = '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}'
_PARAMETERS = _JSON.replace("arguments", "parameters")
_ARGUMENTS = '{"city": "Paris", "days": 3}'
_TOOL_TIME = '{"name": "get_time", "arguments": {}}'

SAMPLES = [
    Sample("llama3_json", _PARAMETERS, PARIS),
    Sample("llama3_json", f"\n\n{_PARAMETERS}; {_PARAMETERS}", PARIS * 2),
    Sample("llama3_json", f"{_PARAMETERS}\n{_PARAMETERS}", PARIS * 2),
    Sample("llama3_json", f"<|python_tag|>{_PARAMETERS}", PARIS),
    Sample("llama3_json", f"<|python_tag|>{_PARAMETERS}<|python_tag|>{_PARAMETERS}", PARIS * 2),
    Sample("llama3_json", f"Well. <|python_tag|>{_PARAMETERS}", PARIS, "Well. "),
    Sample("llama3_json", '<|python_tag|>get_weather.call(city="Paris", days=3)', PARIS),
    Sample("llama3_json", f'{{"type": "function", {_PARAMETERS[1:]}', PARIS),
    Sample("llama3_json", f'{{"type": "function", "function": {_PARAMETERS}}}', PARIS),
    Sample("llama3_json", f"{_PARAMETERS}\nI asked for it.", PARIS, "\nI asked for it."),
    Sample("llama4_pythonic", '[get_weather(city="Paris", days=3)]', PARIS),
    Sample("llama4_pythonic", '[get_time(), get_weather(city="Paris", days=3)]', TIME + PARIS),
    Sample(
        "deepseek_v3",
        "Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        f"```json\n{_ARGUMENTS}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
        "get_time\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        PARIS + TIME,
        "Let me see.",
    ),
    Sample(
        "deepseek_v3",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{_ARGUMENTS}"
        "<｜tool▁call▁end｜><｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        PARIS + TIME,
    ),
    Sample(
        "deepseek_v3",
        f"<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{_ARGUMENTS}<｜tool▁call▁end｜>",
        PARIS,
    ),
    Sample(
        "deepseek_v32",
        'Yes.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="get_time">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        PARIS + TIME,
        "Yes.\n\n",
    ),
    Sample(
        "deepseek_v32",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n'
        f"{_ARGUMENTS}\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        PARIS,
    ),
    Sample("granite", f"<|tool_call|>[{_JSON}]", PARIS),
    Sample("granite", f"<|tool_call|>[{_JSON}, {_TOOL_TIME}]", PARIS + TIME),
    Sample(
        "granite", f'<|tool_call|> [{{"arguments": {_ARGUMENTS}, "name": "get_weather"}}]', PARIS
    ),
    Sample("granite_20b", f"<function_call> {_JSON}<function_call> {_TOOL_TIME}", PARIS + TIME),
    Sample("gigachat3", f"Hm.\n\nfunction call<|role_sep|>\n{_JSON}", PARIS, "Hm.\n\n"),
    Sample("phi4_mini", f"<|tool_call|>[{_JSON}]<|/tool_call|>", PARIS),
    Sample("phi4_mini", f"<|tool_call|>{_JSON}<|/tool_call|>", PARIS),
    Sample("phi4_mini", f"functools[{_JSON}, {_TOOL_TIME}]", PARIS + TIME),
    Sample(
        "command_a",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
        f'{_ARGUMENTS}}},\n    {{"tool_call_id": "1", "tool_name": "get_time", "parameters": {{}}}}'
        "\n]<|END_ACTION|>",
        PARIS + TIME,
    ),
    Sample(
        "command_r",
        'Action: ```json\n[\n    {\n        "tool_name": "get_weather",\n        "parameters": '
        '{\n            "city": "Paris",\n            "days": 3\n        }\n    }\n]\n```',
        PARIS,
    ),
    Sample(
        "seed_oss",
        "\n<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n"
        "<parameter=days>3</parameter>\n</function>\n</seed:tool_call>",
        PARIS,
        "\n",
    ),
    Sample("nemotron_nano_v2", f"<TOOLCALL>[{_JSON}, {_TOOL_TIME}]</TOOLCALL>", PARIS + TIME),
    Sample("hunyuan", f"<tool_calls>[{_JSON}, {_TOOL_TIME}]</tool_calls>", PARIS + TIME),
    Sample("hunyuan", f"<tool_calls>\n{_JSON}\n{_TOOL_TIME}\n</tool_calls>", PARIS + TIME),
    Sample(
        "hunyuan",
        f"<tool_calls>\n<tool_call>get_weather\n```json\n{_ARGUMENTS}\n```</tool_call>\n"
        "<tool_call>get_time\n```json\n{}\n```\n</tool_call>\n</tool_calls>",
        PARIS + TIME,
    ),
    Sample("internlm2", f"Ok<|action_start|><|plugin|>\n{_PARAMETERS}<|action_end|>", PARIS, "Ok"),
    Sample(
        "apertus",
        f'<|tools_prefix|>[{{"get_weather": {_ARGUMENTS}}}, {{"get_time": {{}}}}]<|tools_suffix|>',
        PARIS + TIME,
    ),
    Sample(
        "olmo3",
        "<function_calls>\nget_weather(city='Paris', days=3)\nget_time()\n</function_calls>",
        PARIS + TIME,
    ),
    Sample(
        "olmo3",
        "<function_calls>[get_time(), get_weather(city='Paris', days=3)]</function_calls>",
        TIME + PARIS,
    ),
    # F07
    Sample("json_tools", f"<tool_call>\n{_JSON}\n</tool_call>", PARIS),
    Sample(
        "json_tools",
        f"<tool_call>\n{_JSON}\n</tool_call>\n<tool_call>\n{_TOOL_TIME}\n</tool_call>",
        PARIS + TIME,
        "\n",
    ),
    Sample("json_tools", f"<tool_call>{_JSON}\n{_TOOL_TIME}</tool_call>", PARIS + TIME),
    Sample("json_tools", f"<tool_call>{_JSON}, {_TOOL_TIME},</tool_call>", PARIS + TIME),
    Sample("json_tools", '<tool_call>{"name": "get_time"}</tool_call>', TIME),
    Sample("json_tools", '<tool_call>{"name": "get_time", "arguments": null}</tool_call>', TIME),
    Sample("json_tools", f"<tool_call>{_PARAMETERS}</tool_call>", PARIS),
    Sample(
        "json_tools",
        f'<tool_call>{{"name": "get_weather", "arguments": {json.dumps(_ARGUMENTS)}}}</tool_call>',
        PARIS,
    ),
    Sample(
        "json_tools",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Pa\nris\t", "days": 3}}'
        "</tool_call>",
        [("get_weather", {"city": "Pa\nris\t", "days": 3})],
    ),
    # F08
    Sample("mistral", f"[TOOL_CALLS]get_weather[ARGS]{_ARGUMENTS}", PARIS),
    Sample(
        "mistral",
        f"Ok.[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{_ARGUMENTS}"
        "[TOOL_CALLS]get_time[CALL_ID]abcdefghj[ARGS]{}",
        PARIS + TIME,
        "Ok.",
    ),
    Sample("mistral", f"[TOOL_CALLS] [{_JSON[:-1]}, " + '"id": "abcdefghi"}]', PARIS),
    Sample("mistral", f"[TOOL_CALLS]get_weather{_ARGUMENTS}", PARIS),
    Sample("mistral", f"[TOOL_CALLS]get_weather[ARGS]{_ARGUMENTS}\nSoon.", PARIS, "\nSoon."),
    Sample("pythonic", f"<|tool_call_start|>[{_JSON}]<|tool_call_end|>Soon.", PARIS, "Soon."),
    Sample(
        "pythonic", '<|tool_call_start|>[get_weather(city="Paris", days=3)]<|tool_call_end|>', PARIS
    ),
    Sample(
        "pythonic",
        "<|tool_call_start|>\n```python\nget_weather(city='Paris', days=3)\n```\n<|tool_call_end|>",
        PARIS,
    ),
    Sample("longcat", "<longcat_tool_call>get_time\n</longcat_tool_call>", TIME),
    Sample("longcat", f"<longcat_tool_call>\n{_JSON}\n</longcat_tool_call>", PARIS),
    Sample("glm47", "<tool_call>get_time</tool_call>", TIME),
    Sample(
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        f"<|tool_call_argument_begin|>{_ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>",
        PARIS,
    ),
]
NAMES = [f"{at}-{sample.dialect}" for at, sample in enumerate(SAMPLES)]

TEXTS = [
    ("llama3_json", '{"city": "Paris", "days": 3}'),
    ("llama3_json", '{"name": "Alice", "age": 3}'),
    ("llama3_json", '{"name": "get_weather"}'),
    ("llama3_json", '{"name": "nobody", "parameters": {}}'),
    ("llama3_json", '{"name": "get_weather", "description": "Asks.", "parameters": {}}'),
    ("llama3_json", f"The call is {_PARAMETERS}"),
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
    ("json_tools", f"<tool_call>and {_JSON}</tool_call>"),
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
    dialect, text, calls, content = sample
    splits = [[text], list(text), *([text[:at], text[at:]] for at in range(1, len(text)))]
    for pieces in splits:
        assert read(dialect, pieces, early=early) == (content, calls), pieces


@pytest.mark.parametrize("early", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("dialect", "text"), TEXTS)
def test_F02_F07_F08_a_text_that_merely_looks_like_a_call_stays(
    dialect: str, text: str, early: bool
) -> None:
    for pieces in ([text], list(text), [text[: len(text) // 2], text[len(text) // 2 :]]):
        assert read(dialect, pieces, early=early) == (text, [])


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


def test_every_dialect_has_a_sample() -> None:
    sampled = {sample.dialect for sample in SAMPLES}
    others = set(DIALECTS) - sampled
    assert others == {
        *("function_gemma", "gemma4", "kimi_k3", "laguna", "minicpm5", "minimax_m2", "muse_spark"),
        "qwen3_coder",
    }, "mlx-lm's own, which test_text_call_pieces has"


def test_F02_text_is_sent_as_soon_as_it_is_no_call() -> None:
    """An answer of JSON must not wait for its end because a call could begin like it."""
    for dialect, begun in [
        ("llama3_json", '{"city":'),
        ("llama3_json", "{not"),
        ("llama3_json", '{"name": "Alice", '),
        ("llama4_pythonic", "[the page]"),
        ("command_r", "Actions"),
        ("phi4_mini", "functools."),
    ]:
        split = parser(dialect, early=True)
        for character in begun:
            split.feed(character)
        assert split.content == begun


def test_F02_a_call_without_a_marker_is_one_after_the_thought_too() -> None:
    tokenizer = vocabularies.byte_level("thinking")
    found = markers_of(tokenizer, True)
    split = OutputParser(found, tools=ToolCallParser(TOOLS, DIALECTS["llama3_json"]))
    split.feed(f"\n<think>hm</think>\n{_PARAMETERS}")
    split.end(complete=True)
    assert (split.content, split.reasoning) == ("\n", "hm")
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
    "{{ tools }}": None,
    "no tools here": None,
}


def test_F02_the_words_of_a_template_choose_the_dialect() -> None:
    for template, name in TEMPLATES.items():
        tokenizer = vocabularies.byte_level("plain", template)
        chosen = output_format(tokenizer).calls
        assert (chosen.name if chosen else None) == name, template
        # mlx-lm's own choice, where it makes one, is never another form.
        kept = str(getattr(tokenizer.tool_parser, "__module__", "")).rpartition(".")[2]
        assert kept in ("", name), template


def test_F02_templates_that_take_tools() -> None:
    for template, takes in {"{% if tools %}": True, "{{ xml_tools }}": False, "": False}.items():
        assert template_takes_tools(vocabularies.byte_level("plain", template)) is takes


def test_every_name_and_alias_means_one_dialect() -> None:
    names = [name for dialect in DIALECTS.values() for name in (dialect.name, *dialect.aliases)]
    assert len(set(names)) == len(names)
    for name in names:
        dialect = dialect_named(name)
        assert dialect is not None and name in (dialect.name, *dialect.aliases)
    assert dialect_named("none") is None
