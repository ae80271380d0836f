"""Writes tool calls as models do, in each format of ``mlx_lm.tool_parsers``."""

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
    def one(name: str, arguments: dict[str, Any]) -> str:
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"

    return f"[{', '.join(one(name, arguments) for name, arguments in calls)}]"


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
}

ONE_CALL = {"function_gemma", "glm47", "json_tools", "laguna", "longcat", "minicpm5", "qwen3_coder"}
"""Formats whose markers stand around each single call."""
