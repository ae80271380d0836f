"""Writes tool calls as models do, in each dialect."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

Call = tuple[str, dict[str, Any]]
"""Name and arguments."""

FORCED = "forced calls"
"""The format of calls that a grammar enforces."""


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _text(value: Any) -> str:
    """A value between markers: strings as they are, everything else as JSON."""
    return value if isinstance(value, str) else _json(value)


def _object(call: Call) -> str:
    return _json({"name": call[0], "arguments": call[1]})


def _lines(calls: Sequence[Call], one: Callable[[str, dict[str, Any]], str]) -> str:
    return "\n".join(one(name, arguments) for name, arguments in calls)


def _marked(open: str, argument: str, close: str) -> Callable[[Sequence[Call]], str]:
    def one(name: str, arguments: dict[str, Any]) -> str:
        inside = "".join(argument.format(key, _text(value)) for key, value in arguments.items())
        return f"{open.format(name)}{inside}{close}"

    return lambda calls: _lines(calls, one)


def _kimi_k3(name: str, arguments: dict[str, Any]) -> str:
    def kind(value: Any) -> str:
        return "string" if isinstance(value, str) else "object"

    inside = "".join(
        f'<|open|>argument key="{key}" type="{kind(value)}"<|sep|>{_text(value)}'
        "<|close|>argument<|sep|>"
        for key, value in arguments.items()
    )
    return f'<|open|>call tool="{name}" index="1"<|sep|>{inside}<|close|>call<|sep|>'


def _kimi_k2(calls: Sequence[Call]) -> str:
    return "".join(
        f"<|tool_call_begin|>functions.{name}:{at}<|tool_call_argument_begin|>{_json(arguments)}"
        "<|tool_call_end|>"
        for at, (name, arguments) in enumerate(calls)
    )


def _gemma4(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma4(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_gemma4, value)) + "]"
    return _json(value)


def _function_gemma(name: str, arguments: dict[str, Any]) -> str:
    def text(value: Any) -> str:
        return f"<escape>{value}<escape>" if isinstance(value, str) else _json(value)

    return f"call:{name}{{{','.join(f'{key}:{text(arguments[key])}' for key in arguments)}}}"


def _pythonic(calls: Sequence[Call]) -> str:
    return f"[{', '.join(_keywords(name, arguments) for name, arguments in calls)}]"


def _list(name: str = "name", arguments: str = "arguments") -> Callable[[Sequence[Call]], str]:
    """Writes calls as a JSON list, with these keys."""
    return lambda calls: _json([{name: call[0], arguments: call[1]} for call in calls])


def _headed(begin: str, separator: str, end: str) -> Callable[[Sequence[Call]], str]:
    """Writes each call's name before its arguments."""

    def one(name: str, arguments: dict[str, Any]) -> str:
        return f"{begin}{name}{separator}{_json(arguments)}{end}"

    return lambda calls: "".join(one(name, arguments) for name, arguments in calls)


def _dsml(name: str, arguments: dict[str, Any]) -> str:
    inside = "".join(
        f'<｜DSML｜parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">'
        f"{_text(value)}</｜DSML｜parameter>\n"
        for key, value in arguments.items()
    )
    return f'<｜DSML｜invoke name="{name}">\n{inside}</｜DSML｜invoke>'


def _keywords(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def _command_a(calls: Sequence[Call]) -> str:
    written = [
        {"tool_call_id": str(at), "tool_name": name, "parameters": arguments}
        for at, (name, arguments) in enumerate(calls)
    ]
    return f"[\n    {_json(written)[1:-1]}\n]"


_FENCE = "\n```json\n"
_GLM = _marked("{}", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n", "")

WRITERS: dict[str, Callable[[Sequence[Call]], str]] = {
    FORCED: lambda calls: f"[{','.join(map(_object, calls))}]",
    "function_gemma": lambda calls: _lines(calls, _function_gemma),
    "gemma4": lambda calls: _lines(calls, lambda name, value: f"call:{name}{_gemma4(value)}"),
    "glm47": _GLM,
    "json_tools": lambda calls: f"\n{_lines(calls, lambda *call: _object(call))}\n",
    "kimi_k2": _kimi_k2,
    "kimi_k3": lambda calls: _lines(calls, _kimi_k3),
    "laguna": _GLM,
    "longcat": _marked(
        "{}",
        "<longcat_arg_key>{}</longcat_arg_key>\n<longcat_arg_value>{}</longcat_arg_value>\n",
        "",
    ),
    "minicpm5": _marked('"{}">', '<param name="{}">{}</param>', ""),
    "minimax_m2": _marked(
        '<invoke name="{}">\n', '<parameter name="{}">{}</parameter>\n', "</invoke>"
    ),
    "mistral": lambda calls: _lines(calls, lambda name, value: f"{name}[ARGS]{_json(value)}"),
    "muse_spark": _marked(
        '<atem:invoke name="{}">\n',
        '<atem:parameter name="{}">{}</atem:parameter>\n',
        "</atem:invoke>",
    ),
    "pythonic": _pythonic,
    "qwen3_coder": _marked(
        "\n<function={}>\n", "<parameter={}>\n{}\n</parameter>\n", "</function>\n"
    ),
    "apertus": lambda calls: _json([{name: arguments} for name, arguments in calls]),
    "command_a": _command_a,
    "command_r": lambda calls: f"Action: ```json\n{_list('tool_name', 'parameters')(calls)}\n```",
    "deepseek_v3": _headed("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    "deepseek_v3/fenced": _headed(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", _FENCE, "\n```<｜tool▁call▁end｜>"
    ),
    "deepseek_v32": lambda calls: f"\n{_lines(calls, _dsml)}\n",
    "gigachat3": lambda calls: f"\n{_object(calls[0])}",
    "granite": _list(),
    "granite_20b": lambda calls: f" {_object(calls[0])}",
    "hunyuan": _list(),
    "hunyuan/headed": _headed("<tool_call>function<tool_sep>", _FENCE, "\n```</tool_call>"),
    "hunyuan/lines": lambda calls: f"\n{_lines(calls, lambda *call: _object(call))}\n",
    "internlm2": lambda calls: f"\n{_list(arguments='parameters')(calls[:1])[1:-1]}",
    "json_tools/one_block": lambda calls: f"\n{_lines(calls, lambda *call: _object(call))}\n",
    "llama3_json": lambda calls: "; ".join(
        _list(arguments="parameters")([call])[1:-1] for call in calls
    ),
    "llama3_json/tag": lambda calls: ";".join(
        _json({"type": "function", "name": name, "parameters": arguments})
        for name, arguments in calls
    ),
    "llama4_pythonic": _pythonic,
    "mistral/ids": lambda calls: "[TOOL_CALLS]".join(
        f"{name}[CALL_ID]a0{at}[ARGS]{_json(value)}" for at, (name, value) in enumerate(calls)
    ),
    "mistral/list": lambda calls: f" {_list()(calls)}",
    "nemotron_nano_v2": _list(),
    "olmo3": lambda calls: f"\n{_lines(calls, _keywords)}\n",
    "phi4_mini": _list(),
    "phi4_mini/word": lambda calls: f"functools{_list()(calls)}",
    "pythonic/json": _list(),
    "seed_oss": _marked("\n<function={}>\n", "<parameter={}>{}</parameter>\n", "</function>\n"),
}
"""Each dialect, and after a slash further forms of a dialect."""

ONE_CALL = {
    *("function_gemma", "gigachat3", "glm47", "granite_20b", "internlm2", "json_tools", "laguna"),
    *("longcat", "minicpm5", "qwen3_coder", "seed_oss"),
}
"""Forms whose markers stand around each single call."""

BARE = {"command_r", "llama3_json", "llama4_pythonic", "phi4_mini/word"}
"""Forms without markers: an answer begins with them."""
