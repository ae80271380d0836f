"""Tool calls that are written as calls in Python: ``name(key="text", key=value)``."""

from __future__ import annotations

import ast
import re
from typing import Any

from mlx_lm.tool_parsers import pythonic

from mayfly_worker.text.dialects.call_readers import (
    KeywordArguments,
    NoCall,
    Target,
    read_nested,
    string_sink,
    value_of,
)
from mayfly_worker.text.dialects.json_calls import (
    parse_bare_calls,
    parse_json_calls,
    read_json_calls,
    read_json_list,
)
from mayfly_worker.text.json_pieces import SPACE, GiveUp, Reading, Source, nowhere

_NAME = re.compile(r"[\w.]+")
_PYTHON_PLAIN = {quote: re.compile(rf"[^{quote}\\\n\r]+") for quote in "\"'"}
_PYTHON_ESCAPES = {
    "\\": "\\",
    "'": "'",
    '"': '"',
    "a": "\a",
    "b": "\b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "v": "\v",
    "\n": "",
}


_LITERALS = {"true": True, "false": False, "null": None}
_FENCED = re.compile(r"```(?:python|tool_code|py)?\n(.*)\n```", re.DOTALL)


def parse_python_calls(text: str, tools: Any = None) -> list[dict[str, Any]]:
    """Parses calls in Python's syntax: in a list, or one after the other with line ends or commas
    between them. Values may also be ``true``, ``false`` and ``null``, as in JSON."""
    text = text.strip(SPACE + ",")
    fenced = _FENCED.fullmatch(text)
    calls = []
    for statement in ast.parse(fenced[1] if fenced else text).body:
        if not isinstance(statement, ast.Expr):
            raise ValueError("a statement that is no call")
        value = statement.value
        calls += value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
    return [_call(call) for call in calls]


def _call(node: ast.expr) -> dict[str, Any]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call with keyword arguments alone")
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("an argument without a name")
        arguments[keyword.arg] = ast.literal_eval(_JsonLiterals().visit(keyword.value))
    return {"name": ast.unparse(node.func), "arguments": arguments}


class _JsonLiterals(ast.NodeTransformer):
    """Puts Python's literals in place of JSON's, such as None for null."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        known = node.id in _LITERALS
        return ast.copy_location(ast.Constant(_LITERALS[node.id]), node) if known else node


def parse_llama3(text: str, tools: Any = None) -> list[dict[str, Any]]:
    """Parses calls of Llama 3 and 4: JSON as
    :func:`~mayfly_worker.text.dialects.json_calls.parse_bare_calls`, or ``name.call(key=value)``,
    which calls one of the tools that the model knows by itself."""
    if not text.lstrip().startswith(("{", ";")):
        return [
            {**call, "name": call["name"].removesuffix(".call")}
            for call in parse_python_calls(text)
            if call["name"].endswith(".call")
        ]
    return parse_bare_calls(text)


def read_llama3(source: Source, target: Target) -> Reading[None]:
    """Reads calls as :func:`parse_llama3`, if they are JSON."""
    if (yield from source.skip_space()) != "{":
        raise GiveUp
    yield from read_json_calls(source, target, bare=True, tail=True)


def parse_lfm2(text: str, tools: Any = None) -> Any:
    """Parses calls of LFM2 and MiniCPM3: in Python's syntax, or JSON as
    :func:`~mayfly_worker.text.dialects.json_calls.parse_json_calls`."""
    if re.match(r"\s*(?:\[\s*)?\{", text):
        return parse_json_calls(text)
    try:
        return parse_python_calls(text)
    except (SyntaxError, ValueError):
        return pythonic.parse_tool_call(text, tools)  # reads more than Python's syntax


def read_lfm2(source: Source, target: Target) -> Reading[None]:
    """Reads calls as :func:`parse_lfm2`."""
    first = yield from source.skip_space()
    if first == "{":
        yield from read_json_calls(source, target)
        return
    yield from source.until(nowhere, "[")
    if (yield from source.skip_space()) == "{":
        yield from read_json_list(source, target)
    else:
        yield from _read_list(source, target)


def read_python_calls(source: Source, target: Target) -> Reading[None]:
    """Reads calls as :func:`parse_python_calls`."""
    end = -1
    while True:
        first = yield from source.skip_space(SPACE if end < 0 else SPACE + ",")
        if end >= 0:
            target.split(end, end)
        if first == "[":
            source.at += 1
            yield from _read_list(source, target)
        else:
            yield from _read_call(source, target)
        end = source.position


def read_bare_list(source: Source, target: Target) -> Reading[None]:
    """Reads a list of calls in Python's syntax that no marker says to be calls; text may follow
    that is no call."""
    yield from source.skip_space()
    source.at += 1
    yield from _read_list(source, target)
    end = source.position
    yield from source.skip_space()
    target.split(end, end)


def _read_list(source: Source, target: Target) -> Reading[None]:
    """Reads calls in a list, after its opening bracket."""
    while True:
        yield from source.skip_space()
        yield from _read_call(source, target)
        if (yield from source.skip_space()) != ",":
            yield from source.expect("]")
            return
        end = source.position
        source.at += 1
        start = source.position
        if (yield from source.skip_space()) == "]":
            source.at += 1
            return
        target.split(end, start, listed=True)


def _read_call(source: Source, target: Target) -> Reading[None]:
    name: list[str] = []
    if (yield from source.run(_NAME, name.append)) != "(":
        raise NoCall
    source.at += 1
    target.check("".join(name))
    yield from _read_keywords(source, target, "".join(name))


def _read_keywords(source: Source, target: Target, name: str) -> Reading[None]:
    arguments = KeywordArguments(target, name)
    while True:
        if (yield from source.skip_space()) == ")":
            source.at += 1
            return
        pieces: list[str] = []
        if (yield from source.until(pieces.append, "=", ")")) == ")":
            raise GiveUp
        key = "".join(pieces)
        if (first := (yield from source.skip_space())) in _PYTHON_PLAIN:
            arguments.begin(value_of(target, f"[{name}({key}='')]")[0])
            target.add('"')
            source.at += 1
            yield from _read_python_string(source, target, first)
            ending = yield from source.skip_space()
            if ending not in ",)":
                raise GiveUp
            source.at += 1
            target.add('"')
        else:
            value: list[str] = []
            quotes = {quote: quote for quote in _PYTHON_PLAIN}
            ending = yield from read_nested(source, value, quotes, escapes=True)
            arguments.add(f"[{name}({key}={''.join(value)})]")
        if ending == ")":
            return
        if ending != ",":
            raise GiveUp


def _read_python_string(source: Source, target: Target, quote: str) -> Reading[None]:
    sink = string_sink(target)
    while True:
        character = yield from source.run(_PYTHON_PLAIN[quote], sink)
        source.at += 1
        if character == quote:
            return
        if character != "\\":
            raise GiveUp  # a line's end
        escape = yield from source.take()
        if escape in "xuU":
            digits = ""
            while len(digits) < {"x": 2, "u": 4, "U": 8}[escape]:
                digits += yield from source.take()
            try:
                sink(chr(int(digits, 16)))
            except (ValueError, OverflowError):
                raise GiveUp from None
        elif escape in _PYTHON_ESCAPES:
            sink(_PYTHON_ESCAPES[escape])
        else:
            raise GiveUp
