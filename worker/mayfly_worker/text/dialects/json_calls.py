"""Tool calls whose arguments are JSON: parsers of whole texts, and readers that follow a text piece
by piece.

Models write more than their templates ask for, and all of it is read as it is meant: arguments as a
JSON text within the JSON, line ends within strings, several calls one after the other, and calls
without arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mayfly_worker.text.dialects.call_readers import NoCall, Target, read_arguments
from mayfly_worker.text.json_pieces import (
    SPACE,
    GiveUp,
    NotJson,
    Reading,
    Source,
    nowhere,
    read_string,
    read_value,
)

_BETWEEN = SPACE + ",;"
"""Characters between two calls."""

_DECODER = json.JSONDecoder(strict=False)

_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters")
_BARE = {"id", "type", "function", *_NAMES, *_ARGUMENTS}
"""Keys of a JSON object that is a call although no marker says so."""


def _json(text: str) -> Any:
    return json.loads(text, strict=False)


def _call(value: Any) -> dict[str, Any]:
    """Returns the call that a JSON value describes. Raises ValueError if it describes none."""
    if not isinstance(value, dict):
        raise ValueError("a call is an object")
    inner = value.get("function")
    if isinstance(inner, dict):
        return {**_call(inner), "id": value.get("id")}
    arguments = next((value[key] for key in _ARGUMENTS if key in value), None)
    if isinstance(arguments, str):
        arguments = _json(arguments)
    return {
        "id": value.get("id"),
        "name": next((value[key] for key in _NAMES if key in value), None),
        "arguments": {} if arguments is None else arguments,
    }


def _values(text: str) -> Iterator[Any]:
    """Yields the JSON values in a text, those in a list one by one. Raises ValueError if anything
    else is in the text."""
    at = 0
    while True:
        while at < len(text) and text[at] in _BETWEEN:
            at += 1
        if at == len(text):
            return
        value, at = _DECODER.raw_decode(text, at)
        yield from value if isinstance(value, list) else [value]


def parse_json_calls(text: str, tools: Any = None) -> list[dict[str, Any]]:
    """Parses ``{"name": …, "arguments": {…}}``, or several of these, in a list or one after the
    other."""
    return [_call(value) for value in _values(text)]


def parse_bare_calls(text: str, tools: Any = None) -> list[dict[str, Any]]:
    """Parses calls as :func:`parse_json_calls`, but from a text that no marker says to be a call:
    an object without arguments, or with other keys than those of a call, is none."""
    values = list(_values(text))
    if not all(map(_is_bare_call, values)):
        raise ValueError("an object that is no call")
    return [_call(value) for value in values]


def _is_bare_call(value: Any) -> bool:
    call = value["function"] if isinstance(value.get("function"), dict) else value
    return _BARE.issuperset(value) and any(key in call for key in _ARGUMENTS)


def read_json_calls(
    source: Source, target: Target, *, bare: bool = False, tail: bool = False
) -> Reading[None]:
    """Reads calls as :func:`parse_json_calls` or, with ``bare``, as :func:`parse_bare_calls`. With
    ``tail``, text may follow that is no call, and that the calls before it do not depend on."""
    try:
        yield from _read_calls(source, target, bare=bare, tail=tail)
    except NotJson as error:
        raise NoCall if bare else GiveUp from error


def _read_calls(source: Source, target: Target, *, bare: bool, tail: bool) -> Reading[None]:
    end = -1
    while True:
        first = yield from source.skip_space(SPACE if end < 0 else _BETWEEN)
        if end >= 0 and (tail or first in "{["):
            target.split(end, end)
        if first not in "{[":
            raise NoCall if end < 0 or tail else GiveUp
        if first == "[":
            source.at += 1
            yield from read_json_list(source, target, bare=bare)
        else:
            yield from _read_call(source, target, bare=bare)
        end = source.position


def read_json_list(source: Source, target: Target, *, bare: bool = False) -> Reading[None]:
    """Reads the calls of a JSON list, after its opening bracket."""
    while True:
        if (yield from source.skip_space()) != "{":
            raise NoCall
        yield from _read_call(source, target, bare=bare)
        if (yield from source.skip_space()) != ",":
            yield from source.expect("]")
            return
        yield from _split_at_comma(source, target)


def _split_at_comma(source: Source, target: Target) -> Reading[None]:
    """Reads the comma between two calls of a list, and ends the call before it."""
    end = source.position
    source.at += 1
    start = source.position
    yield from source.skip_space()
    target.split(end, start, listed=True)


def _read_call(source: Source, target: Target, *, bare: bool) -> Reading[None]:
    yield from source.expect("{")
    name, id, begun = "", None, False
    while True:
        yield from source.skip_space()
        quoted = yield from _string(source)
        yield from source.skip_space()
        yield from source.expect(":")
        key = quoted[1:-1]
        if bare and key not in _BARE:
            raise NoCall
        first = yield from source.skip_space()
        if key in _NAMES and not name and first == '"':
            name = (yield from _string(source))[1:-1]
            if "\\" in name:
                raise GiveUp
            target.check(name)
        elif key in _ARGUMENTS and name and not begun and first == "{":
            yield from read_arguments(source, target, name, id)
            begun = True
        elif key in (*_NAMES, *_ARGUMENTS, "function"):
            raise GiveUp
        elif key == "id" and first == '"':
            id = json.loads((yield from _string(source))) or None
        else:
            yield from read_value(source, nowhere, unique=False)
        yield from source.skip_space()
        if (yield from source.take()) != ",":
            return


def _string(source: Source) -> Reading[str]:
    pieces: list[str] = []
    yield from read_string(source, pieces.append)
    return "".join(pieces)


# Calls whose names stand before the JSON


def parse_apertus(text: str, tools: Any = None) -> list[dict[str, Any]]:
    """Parses ``[{"name": {…}}, …]``, in which each call's only key is its name."""
    calls = []
    for value in _values(text):
        [(name, arguments)] = value.items()
        calls.append({"name": name, "arguments": arguments})
    return calls


def read_apertus(source: Source, target: Target) -> Reading[None]:
    """Reads calls as :func:`parse_apertus`."""
    yield from source.skip_space()
    yield from source.expect("[")
    while True:
        yield from source.skip_space()
        yield from source.expect("{")
        yield from source.skip_space()
        name = json.loads((yield from _string(source)))
        yield from source.skip_space()
        yield from source.expect(":")
        yield from source.skip_space()
        yield from read_arguments(source, target, name)
        yield from source.skip_space()
        yield from source.expect("}")
        if (yield from source.skip_space()) != ",":
            return
        yield from _split_at_comma(source, target)


_MISTRAL = re.compile(
    r"\s*(?:\[TOOL_CALLS\]\s*)?([\w.-]+)\s*"
    r"(?:\[CALL_ID\]\s*([\w.-]+)\s*)?(?:\[ARGS\]\s*)?(?=\{)"
)


def parse_mistral(text: str, tools: Any = None) -> list[dict[str, Any]]:
    """Parses calls in Mistral's forms: ``name[ARGS]{…}``, also with ``[CALL_ID]id`` after the name,
    or JSON as :func:`parse_json_calls`."""
    if re.match(r"\s*(?:\[\s*)?\{", text):
        return parse_json_calls(text)
    calls, at = [], 0
    while text[at:].strip():
        header = _MISTRAL.match(text, at)
        if header is None:
            raise ValueError("no name of a call")
        arguments, at = _DECODER.raw_decode(text, header.end())
        calls.append({"name": header[1], "id": header[2], "arguments": arguments})
    return calls


def read_mistral(source: Source, target: Target) -> Reading[None]:
    """Reads calls as :func:`parse_mistral`. Text may follow that is no call."""
    if (yield from source.skip_space()) in "[{":
        yield from read_json_calls(source, target, tail=True)
        return
    while True:
        pieces: list[str] = []
        yield from source.until(pieces.append, "{")
        source.at -= 1
        head = "".join(pieces)
        header = _MISTRAL.match(head + "{")
        if header is None or header.end() != len(head):
            raise GiveUp
        yield from read_arguments(source, target, header[1], header[2])
        end = source.position
        yield from source.skip_space()
        target.split(end, end)


@dataclass(frozen=True)
class Headed:
    """Markers of a form in which the call's name stands before its arguments:

        begin | NAME | separator | {…} | end                              (DeepSeek V3.1, Kimi K2)
        begin | kind | separator | NAME | line end | ```json {…} ``` | end    (DeepSeek R1 and V3)

    ``ids`` says that the name is part of an id, ``functions.NAME:0``, or follows it after the
    marker ``named``."""

    begin: str
    separator: str
    end: str
    ids: bool = False
    named: str = ""


DEEPSEEK = Headed("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
FUNCTIONARY = Headed("<function=", ">", "</function>")
HUNYUAN = Headed("<tool_call>", "<tool_sep>", "</tool_call>")
KIMI_K2 = Headed(
    "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", ids=True
)
SOLAR = Headed(
    "<|tool_call:begin|>",
    "<|tool_call:args|>",
    "<|tool_call:end|>",
    ids=True,
    named="<|tool_call:name|>",
)

_KIMI_ID = re.compile(r"((?:functions\.)?(.+?):\d+)", re.DOTALL)
_FENCE = re.compile(r"\s*```(?:json)?\s*")


def parse_hunyuan(text: str, tools: Any = None) -> list[dict[str, Any]]:
    """Parses calls of Hunyuan's models, which are JSON or have markers."""
    return (
        parse_json_calls(text)
        if text.lstrip().startswith(("[", "{"))
        else parse_headed(HUNYUAN, text)
    )


def read_hunyuan(source: Source, target: Target) -> Reading[None]:
    """Reads calls as :func:`parse_hunyuan`."""
    if (yield from source.skip_space()) in "[{":
        yield from read_json_calls(source, target)
    else:
        yield from read_headed(HUNYUAN, source, target)


def parse_headed(form: Headed, text: str, tools: Any = None) -> list[dict[str, Any]]:
    """Parses one or several calls whose markers are those of ``form``."""
    calls = []
    parts = text.split(form.begin)
    for part in parts[0 if parts[0].strip() else 1 :]:
        header, found, body = part.partition(form.separator)
        body = body.strip().removesuffix(form.end).strip()
        if not found:
            # Hunyuan's smaller models leave the kind of the tool out.
            header, body = "", part.strip().removesuffix(form.end).strip()
        elif form.ids or body.startswith("{"):
            calls.append({**_named(form, header), "arguments": _json(body)})
            continue
        name, _, fenced = body.partition("\n")
        opening = _FENCE.match(fenced)
        if opening is None:
            raise ValueError("no arguments")
        arguments = _json(fenced[opening.end() :].removesuffix("```"))
        calls.append({"name": name.strip(), "arguments": arguments})
    return calls


def _named(form: Headed, header: str) -> dict[str, Any]:
    """Returns the name, and the id if the model gave one, of the call with this header."""
    if not form.ids:
        return {"name": header.strip(), "id": None}
    if form.named:
        id, _, name = header.partition(form.named)
        return {"name": name.strip(), "id": id.strip()}
    named = _KIMI_ID.fullmatch(header.strip())
    if named is None:
        raise GiveUp
    return {"name": named[2], "id": named[1]}


def read_headed(form: Headed, source: Source, target: Target) -> Reading[None]:
    """Reads one or several calls whose markers are those of ``form``."""
    header: list[str] = []
    while True:
        yield from source.until(header.append, form.separator)
        call = _named(form, "".join(header).rpartition(form.begin)[2])
        if (yield from source.skip_space()) != "{":
            pieces: list[str] = []
            yield from source.until(pieces.append, "\n")
            call = {"name": "".join(pieces).strip(), "id": None}
            pieces.clear()
            yield from source.until(pieces.append, "{")
            source.at -= 1
            if not _FENCE.fullmatch("".join(pieces)):
                raise GiveUp
        yield from read_arguments(source, target, call["name"], call["id"])
        yield from source.until(nowhere, form.begin)
        start = source.position - len(form.begin)
        header.clear()
        # The next call is one once it has a name.
        yield from source.until(header.append, form.separator)
        target.split(start, start)
        source.at -= len(form.separator)


# Calls with a word before the JSON


def _after(word: str, text: str) -> str:
    """Returns a text without the ``word`` at its beginning, and without the fence of a code
    block."""
    rest = text.strip().removeprefix(word)
    opening = _FENCE.match(rest)
    return rest[opening.end() if opening else 0 :].removesuffix("```")


def parse_after(word: str, text: str, tools: Any = None) -> list[dict[str, Any]]:
    """Parses calls as :func:`parse_json_calls`, which a ``word`` may precede and the fence of a
    code block surround, as in Command-R's ``Action: ```json [{…}] `````."""
    return parse_json_calls(_after(word, text))


def read_after(word: str, source: Source, target: Target) -> Reading[None]:
    """Reads calls as :func:`parse_after`."""
    pieces: list[str] = []
    yield from source.until(pieces.append, "[", "{")
    source.at -= 1
    if _after(word, "".join(pieces)).strip():
        raise NoCall
    fenced = "```" in "".join(pieces)
    yield from read_json_calls(source, target, tail=not fenced)
