"""Texts with tool calls and thoughts, as models of each family write them, and what is meant."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from mayfly_worker.text.dialects.families import DIALECTS
from mayfly_worker.text.dialects.thoughts import THOUGHTS_IN_ORDER
from support.call_writer import WRITERS


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
    thought: str = "none"
    """Name of the form of the thought."""
    reasoning: str = ""
    in_prompt: str = ""
    """End of the prompt, if it is part of what is written."""


_JSON = '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}'
_PARAMETERS = _JSON.replace("arguments", "parameters")
_ARGUMENTS = '{"city": "Paris", "days": 3}'
_TOOL_TIME = '{"name": "get_time", "arguments": {}}'

_FUNCTION = (
    "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>"
)

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
    Sample("gigachat3", f"<|function_call|>{_JSON}", PARIS),
    Sample(
        "functionary",
        f"<function=get_weather>{_ARGUMENTS}</function><function=get_time>{{}}</function>",
        PARIS + TIME,
    ),
    Sample(
        "minimax_m3",
        '~<tool_call>\n~<invoke name="get_weather">~<city>Paris~</city>~<days>3~</days>~</invoke>\n'
        '~<invoke name="get_time">~</invoke>\n~</tool_call>'.replace("~", "]<]minimax[>["),
        PARIS + TIME,
    ),
    Sample(
        "minimax_m3",
        '~<tool_call>~<invoke name="get_weather">~<city>~<item>a~</item>~<item>~<b>\nc ~</b>'
        "~</item>~</city>~</invoke>~</tool_call>".replace("~", "]<]minimax[>["),
        [("get_weather", {"city": ["a", {"b": "\nc "}]})],
    ),
    Sample(
        "solar_open",
        "<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>get_weather<|tool_call:args|>"
        f"{_ARGUMENTS}<|tool_call:end|><|tool_call:begin|>f6<|tool_call:name|>get_time"
        "<|tool_call:args|>{}<|tool_call:end|><|calls|>",
        PARIS + TIME,
    ),
    # F01
    Sample(
        "harmony",
        "<|channel|>analysis<|message|>Which city?<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.get_weather <|constrain|>json<|message|>{_ARGUMENTS}<|call|>",
        PARIS,
    ),
    Sample(
        "harmony",
        "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant "
        f"to=functions.get_weather<|channel|>commentary json<|message|>{_ARGUMENTS}<|call|>",
        PARIS,
        "Let me see.",
    ),
    Sample(
        "harmony",
        f" to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>{_ARGUMENTS}"
        "<|call|><|start|>assistant to=functions.get_time<|channel|>commentary<|message|>{}",
        PARIS + TIME,
    ),
    Sample(
        "harmony",
        "<|channel|>commentary to=functions.get_weather<|constrain|>json<|message|>"
        f"{_ARGUMENTS}<|end|><|start|>assistant<|channel|>final<|message|>Soon.<|return|>",
        PARIS,
        "Soon.",
    ),
    Sample(
        "harmony",
        f"<|channel|>analysis to=functions.get_weather code<|message|>{_ARGUMENTS}<|call|>",
        PARIS,
    ),
    Sample(
        "harmony", "<|channel|>commentary to=get_time <|constrain|>json<|message|><|call|>", TIME
    ),
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
    Sample("qwen3_coder", f"<tool_call>\n{_FUNCTION}\n</tool_call>", PARIS),
    Sample("qwen3_coder", f"Ok.\n{_FUNCTION}\n</tool_call>", PARIS, "Ok.\n"),
    Sample("qwen3_coder", f"Ok.\n{_FUNCTION}\n", PARIS, "Ok.\n"),
    Sample("qwen3_coder", f"<tool_call>\n{_FUNCTION}\n{_FUNCTION}</tool_call>", PARIS * 2),
    Sample("qwen3_coder", "<tool_call>\n<function=get_time>\n</function>\n</tool_call>", TIME),
    # F07
    Sample("json_tools", f"<tool_call>\n{_JSON}\n</tool_call>", PARIS),
    Sample(
        "json_tools",
        f"<tool_call>\n{_JSON}\n</tool_call>\n<tool_call>\n{_TOOL_TIME}\n</tool_call>",
        PARIS + TIME,
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
    Sample(
        "json_tools",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "a \\" </tool_call> b"}}'
        "</tool_call>!",
        [("get_weather", {"city": 'a " </tool_call> b'})],
        "!",
    ),
    Sample(
        "json_tools",
        f'<tool_call>{{"name": "nobody", "arguments": {{"x": "5}}}}</tool_call><tool_call>{_JSON}'
        "</tool_call>",
        PARIS,
        '<tool_call>{"name": "nobody", "arguments": {"x": "5}}</tool_call>',
    ),
    Sample(
        "json_tools",
        f"Write <tool_call> before a call:\n<tool_call>{_JSON}</tool_call>",
        PARIS,
        "Write <tool_call> before a call:\n",
    ),
    Sample("json_tools", f"<tool_call><tool_call>{_JSON}</tool_call>", PARIS, "<tool_call>"),
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
        "glm47",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        PARIS,
    ),
    Sample(
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        f"<|tool_call_argument_begin|>{_ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>",
        PARIS,
    ),
]


def _of_writer(name: str) -> Sample:
    dialect = DIALECTS[name]
    text = "".join((*dialect.starts, WRITERS[name](PARIS), *dialect.ends))
    return Sample(name, f"So: {text}", PARIS, "So: ")


SAMPLES += [_of_writer(name) for name in sorted(set(DIALECTS) - {one.dialect for one in SAMPLES})]


def _thought(
    thought: str,
    text: str,
    reasoning: str,
    content: str,
    calls: Calls | None = None,
    *,
    dialect: str = "json_tools",
    in_prompt: str = "",
) -> Sample:
    return Sample(dialect, text, calls or [], content, thought, reasoning, in_prompt)


_HERMES = f"<tool_call>\n{_JSON}\n</tool_call>"
_SEED_CALL = (
    "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n"
    "<parameter=days>3</parameter>\n</function>\n</seed:tool_call>"
)
_SEED_BUDGET = "<seed:cot_budget_reflect>I have used 60 tokens.</seed:cot_budget_reflect>"
_COMMAND_CALL = (
    '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
    f"{_ARGUMENTS}}}\n]<|END_ACTION|>"
)
_APERTUS_CALL = f'<|tools_prefix|>[{{"get_weather": {_ARGUMENTS}}}]<|tools_suffix|>'
_M3_CALL = (
    '~<tool_call>\n~<invoke name="get_weather">~<city>Paris~</city>~<days>3~</days>~</invoke>\n'
    "~</tool_call>".replace("~", "]<]minimax[>[")
)

THOUGHT_SAMPLES = [
    _thought("think", "<think>\nHm.\n</think>\n\nYes.", "\nHm.\n", "\n\nYes."),
    _thought("think", f"<think>\nHm.\n</think>\n\n{_HERMES}", "\nHm.\n", "", PARIS),
    _thought("think", f"<think>\nHm.\n</think>\n\nSo:\n{_HERMES}", "\nHm.\n", "\n\nSo:\n", PARIS),
    _thought("think", "<think>\n\n</think>\n\nYes.", "\n\n", "\n\nYes."),
    _thought("think", "Hm.\n</think>\n\nYes.", "Hm.\n", "\n\nYes.", in_prompt="<think>\n"),
    _thought("think", "<think>\nHm.</think>Yes.", "\nHm.", "Yes.", in_prompt="<think>\n"),
    _thought("think", "Yes.", "", "Yes.", in_prompt="<think>\n\n</think>\n\n"),
    _thought("think", "</think>Yes.", "", "Yes."),
    _thought("think", "I end it by </think>, see?", "", "I end it by </think>, see?"),
    _thought("think", "<think>So <think> begins it.</think>Yes.", "So <think> begins it.", "Yes."),
    # A call ends the thought in which it stands.
    _thought("think", f"<think>Hm.{_HERMES}</think>", "Hm.", "", PARIS),
    _thought("think", f"<think>Hm.{_HERMES}\n</think>\nYes.", "Hm.", "\n\nYes.", PARIS),
    # Thoughts between calls
    _thought(
        "think",
        f"<think>Hm.</think>{_HERMES}<think>And.</think>{_HERMES}",
        "Hm.And.",
        "",
        PARIS * 2,
    ),
    _thought("deepseek_r1", "Hm.\n</think>\n\nYes.", "Hm.\n", "\n\nYes."),
    _thought("deepseek_r1", "<think>\nHm.\n</think>\n\nYes.", "\nHm.\n", "\n\nYes."),
    _thought("deepseek_r1", "Yes.", "", "Yes.", in_prompt="<think>\n\n</think>"),
    _thought("mistral", "[THINK]Hm.[/THINK]Yes.", "Hm.", "Yes."),
    _thought(
        "mistral",
        f"[THINK]Hm.[/THINK][TOOL_CALLS]get_weather[ARGS]{_ARGUMENTS}",
        "Hm.",
        "",
        PARIS,
        dialect="mistral",
    ),
    _thought(
        "command_a",
        "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>",
        "Hm.",
        "Yes.",
        dialect="command_a",
    ),
    _thought(
        "command_a",
        f"<|START_THINKING|>Hm.<|END_THINKING|>{_COMMAND_CALL}",
        "Hm.",
        "",
        PARIS,
        dialect="command_a",
    ),
    _thought(
        "seed_oss",
        f"<seed:think>\nHm.\n{_SEED_BUDGET}\nSo.\n</seed:think>Yes.",
        f"\nHm.\n{_SEED_BUDGET}\nSo.\n",
        "Yes.",
        dialect="seed_oss",
    ),
    _thought(
        "seed_oss",
        f"<seed:think>\nHm.\n</seed:think>\n{_SEED_CALL}",
        "\nHm.\n",
        "",
        PARIS,
        dialect="seed_oss",
    ),
    _thought(
        "seed_oss",
        "Yes.",
        "",
        "Yes.",
        dialect="seed_oss",
        in_prompt=f"<seed:think>\n{_SEED_BUDGET}\n</seed:think>",
    ),
    _thought(
        "apertus",
        "<|inner_prefix|>Hm.<|inner_suffix|>Yes.",
        "Hm.",
        "Yes.",
        dialect="apertus",
    ),
    _thought(
        "apertus",
        f"<|inner_prefix|>Hm.{_APERTUS_CALL}",
        "Hm.",
        "",
        PARIS,
        dialect="apertus",
    ),
    _thought("minimax_m3", "<mm:think>Hm.</mm:think>Yes.", "Hm.", "Yes.", dialect="minimax_m3"),
    _thought("minimax_m3", "</mm:think>Yes.", "", "Yes.", dialect="minimax_m3"),
    _thought(
        "minimax_m3",
        f"<mm:think>Hm.</mm:think>{_M3_CALL}",
        "Hm.",
        "",
        PARIS,
        dialect="minimax_m3",
    ),
    _thought("gemma4", "<|channel>thought\nHm.\n<channel|>Yes.", "\nHm.\n", "Yes."),
    _thought("gemma4", "Yes.", "", "Yes.", in_prompt="<|channel>thought\n<channel|>"),
    _thought(
        "granite",
        "Here is my thought process:\n\nHm.\n\nHere is my response:\n\nYes.",
        "\n\nHm.\n\n",
        "\n\nYes.",
    ),
    _thought(
        "granite",
        "Here's my thought process: Hm. Here's my response: Yes: Here is my thought process: no.",
        " Hm. ",
        " Yes: Here is my thought process: no.",
    ),
    _thought(
        "granite",
        f"Here is my thought process: Hm.\nHere is my response: <|tool_call|>[{_JSON}]",
        " Hm.\n",
        "",
        PARIS,
        dialect="granite",
    ),
    _thought("granite", "<think>Hm.</think><response>Yes.</response>", "Hm.", "Yes."),
    _thought("granite", "<think>Hm.</think>\n\n<response>Yes.</response>\n", "Hm.", "\n\nYes."),
    _thought(
        "granite",
        "<response>It ends by </response>.</response>",
        "",
        "It ends by </response>.",
    ),
    _thought(
        "granite", "Write <response> and <think> here.", "", "Write <response> and <think> here."
    ),
    _thought(
        "hunyuan_a13b",
        "<think>\nHm.\n</think>\n<answer>\nYes.\n</answer>",
        "\nHm.\n",
        "\n\nYes.\n",
    ),
    _thought(
        "hunyuan_a13b", "<think>\n\n</think>\n<answer>\nYes.\n</answer>", "\n\n", "\n\nYes.\n"
    ),
    _thought(
        "hunyuan_a13b",
        f"<think>\nHm.\n</think>\n<tool_calls>[{_JSON}]</tool_calls>",
        "\nHm.\n",
        "",
        PARIS,
        dialect="hunyuan",
    ),
    _thought(
        "apriel",
        "Hm.\n[BEGIN FINAL RESPONSE]\nYes.\n[END FINAL RESPONSE]\n",
        "Hm.\n",
        "\nYes.\n",
        in_prompt="Here are my reasoning steps:\n",
    ),
    _thought(
        "openthinker",
        "<|begin_of_thought|>Hm.<|end_of_thought|><|begin_of_solution|>Yes.<|end_of_solution|>",
        "Hm.",
        "Yes.",
    ),
    _thought(
        "exaone_deep", "Hm.\n</thought>\n\nYes.", "Hm.\n", "\n\nYes.", in_prompt="<thought>\n"
    ),
    _thought(
        "reasoning",
        "<reasoning>\nHm.\n</reasoning>\n<answer>\nYes.\n</answer>",
        "\nHm.\n",
        "\n\nYes.\n",
    ),
]
"""Texts with thoughts, each in the form of one family."""

for _form in THOUGHTS_IN_ORDER:
    _written = f"{_form.start}Hm.{_form.end}"
    THOUGHT_SAMPLES += [
        _thought(_form.name, f"{_written} Yes.", "Hm.", " Yes."),
        _thought(_form.name, f"{_written}\n{_HERMES}", "Hm.", "", PARIS),
        _thought(_form.name, f"{_form.start}{_form.end}Yes.", "", "Yes."),
        _thought(_form.name, f"Hm.{_form.end}Yes.", "Hm.", "Yes.", in_prompt=_form.start),
    ]
