"""Tool calls in the dialects that write each argument between markers, as XML does: readers that
follow a text piece by piece, and parsers of whole texts where mlx-lm's do not serve.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from mlx_lm.tool_parsers import longcat, qwen3_coder

from mayfly_worker.text.dialects.call_readers import ParseCalls, Target, read_arguments
from mayfly_worker.text.dialects.json_calls import parse_json_calls, read_json_calls
from mayfly_worker.text.dialects.markup_values import (
    MarkupValue,
    OpenTexts,
    Trim,
    TrimData,
    TrimLines,
    TrimNothing,
)
from mayfly_worker.text.json_pieces import GiveUp, Reading, Source, json_text, nowhere


@dataclass(frozen=True)
class Markup:
    """The markers of a format of tool calls that writes each argument between markers. Where ``|``
    stands for no text, a call is

        call | NAME | named | ARGUMENT | ... | ended

    and an argument

        argument | KEY | keyed | white space, middle | VALUE | closed

    ``ended`` is empty in a format of one call only; ``named`` is empty if the first argument
    follows the name directly. ``bounded`` says that ``ended`` within a value
    ends the call, too. ``plain`` says that texts may contain ``argument``, which is common in XML.
    ``trim`` removes what surrounds the text of a value, such as white space;
    ``open_texts`` tells texts from other values if the request's schema does not.
    """

    argument: str
    keyed: str
    closed: str
    call: str = ""
    named: str = ""
    ended: str = ""
    middle: str = ""
    bounded: bool = False
    plain: bool = False
    trim: type[Trim] = Trim
    open_texts: OpenTexts = ""


_DSML = "｜DSML｜"

MARKUPS = {
    "deepseek_v32": Markup(
        f"<{_DSML}parameter",
        ">",
        f"</{_DSML}parameter>",
        call=f"<{_DSML}invoke",
        named=">",
        ended=f"</{_DSML}invoke>",
        trim=TrimNothing,
    ),
    "glm47": Markup(
        "<arg_key>",
        "</arg_key>",
        "</arg_value>",
        middle="<arg_value>",
        open_texts="literal",
    ),
    "kimi_k3": Markup(
        "<|open|>argument",
        "<|sep|>",
        "<|close|>argument<|sep|>",
        call="<|open|>call",
        named="<|sep|>",
        ended="<|close|>call<|sep|>",
        bounded=True,
        trim=TrimNothing,
        open_texts="json",
    ),
    "longcat": Markup(
        "<longcat_arg_key>",
        "</longcat_arg_key>",
        "</longcat_arg_value>",
        middle="<longcat_arg_value>",
        open_texts="literal",
    ),
    "minicpm5": Markup("<param", ">", "</param>", named=">", plain=True, trim=TrimData),
    "minimax_m2": Markup(
        "<parameter name=",
        ">",
        "</parameter>",
        call="<invoke name=",
        named=">",
        ended="</invoke>",
        bounded=True,
        plain=True,
    ),
    "muse_spark": Markup(
        "<atem:parameter",
        ">",
        "</atem:parameter>",
        call="<atem:invoke",
        named=">",
        ended="</atem:invoke>",
        open_texts="json",
    ),
    "qwen3_coder": Markup(
        "<parameter=",
        ">",
        "</parameter>",
        call="<function=",
        named=">",
        ended="</function>",
        trim=TrimLines,
    ),
}

_BLOCK = "<|open|>json"
"""Marker that, in Kimi K3's format, begins all arguments of a call as one JSON object."""


@lru_cache
def _complete(markup: Markup) -> re.Pattern[str]:
    """Returns a pattern of texts in which each argument that begins also ends."""
    argument, keyed, closed = map(re.escape, (markup.argument, markup.keyed, markup.closed))
    middle = rf"(?:\\n|\s)*{re.escape(markup.middle)}" if markup.middle else ""
    text = "." if markup.plain else rf"(?!{argument})."
    whole = rf"(?>{argument}(?:{text})*?{keyed}){middle}(?:{text})*?{closed}"
    return re.compile(rf"(?>(?:(?!{argument}).)+|{whole})*+", re.DOTALL)


def parse_markup(parse: ParseCalls, markup: Markup, text: str, tools: Any = None) -> Any:
    """Parses calls by ``parse``, one of mlx-lm's functions, most of which leave out an argument
    that has no end. Raises ValueError if there is such an argument."""
    if not _complete(markup).fullmatch(text):
        raise ValueError("an argument without its end")
    return parse(text, tools)


_FUNCTION = re.compile(
    r"\s*(<function=[^<>]*>?\s*"
    r"(?>(?><parameter=(?:(?!<parameter=).)*?</parameter>\s*)*)</function>)\s*",
    re.DOTALL,
)


def parse_functions(text: str, tools: Any = None) -> list[Any]:
    """Parses one or several calls of Qwen3-Coder or Seed-OSS, which mlx-lm's function takes for one
    call. Raises ValueError for text outside of calls and arguments."""
    calls: list[Any] = []
    at = 0
    while at < len(text) or not calls:
        found = _FUNCTION.match(text, at)
        if found is None:
            raise ValueError("no call")
        calls.append(qwen3_coder.parse_tool_call(found[1], tools))
        at = found.end()
    return calls


_DSML_CALL = re.compile(rf'<{_DSML}invoke\s+name="([^"]*)"\s*>(.*?)</{_DSML}invoke>', re.DOTALL)
_DSML_ARGUMENT = re.compile(
    rf'<{_DSML}parameter\s+name="([^"]*)"(?:\s+string="(true|false)")?\s*>'
    rf"(.*?)</{_DSML}parameter>",
    re.DOTALL,
)


def parse_dsml(text: str, tools: Any = None) -> list[dict[str, Any]]:
    """Parses DeepSeek's markup language, DSML, in which a mark beside each value says if it is a
    text or JSON. Raises ValueError for text outside of calls and arguments."""
    if _DSML_CALL.sub("", text).strip():
        raise ValueError("text outside of calls")
    return [
        {"name": call[1], "arguments": _dsml_arguments(call[2])}
        for call in _DSML_CALL.finditer(text)
    ]


def _dsml_arguments(body: str) -> dict[str, Any]:
    rest = _DSML_ARGUMENT.sub("", body).strip()
    if rest:
        return dict(json.loads(rest, strict=False))  # some calls have all arguments as one object
    arguments = {}
    for key, mark, value in _DSML_ARGUMENT.findall(body):
        arguments[key] = value
        if mark != "true":
            with suppress(ValueError):
                arguments[key] = json.loads(value, strict=False)
    return arguments


_MINIMAX = "]<]minimax[>["
_MINIMAX_MARK = re.compile(re.escape(_MINIMAX) + r"<(/?)([^<>\s]+)(?:\s+name=\"([^\"]*)\")?>")


def parse_minimax_m3(text: str, tools: Any = None) -> list[dict[str, Any]]:
    """Parses MiniMax M3's calls, in which every key of the arguments, nested ones too, and every
    item of a list is an element with a mark before each of its tags. Raises ValueError for text
    outside of calls and arguments."""
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools or ()}
    pieces = _MINIMAX_MARK.split(text)
    calls = []
    at = 0
    while at + 1 < len(pieces):
        closing, tag, name = pieces[at + 1 : at + 4]
        if pieces[at].strip() or closing or tag != "invoke":
            raise ValueError("text outside of calls")
        arguments, at = _minimax_value(pieces, at + 4, "invoke", schemas.get(name) or {})
        calls.append({"name": name, "arguments": arguments or {}})
    if pieces[at].strip():
        raise ValueError("text outside of calls")
    return calls


def _minimax_value(
    pieces: list[str], at: int, ended: str, schema: dict[str, Any]
) -> tuple[Any, int]:
    """Returns the value that begins at the piece ``at`` and that the tag ``ended`` ends, and the
    place of the piece after this tag."""
    text = pieces[at]
    members: list[tuple[str, Any]] = []
    while at + 1 < len(pieces):
        closing, tag = pieces[at + 1 : at + 3]
        if closing:
            if tag != ended:
                break
            return _minimax_members(members) if members else _typed(text, schema), at + 4
        if pieces[at].strip():
            break
        inner = (schema.get("properties") or {}).get(tag) or schema.get("items") or {}
        value, at = _minimax_value(pieces, at + 4, tag, inner)
        members.append((tag, value))
    raise ValueError(f"no end of {ended}")


def _minimax_members(members: list[tuple[str, Any]]) -> Any:
    if all(key == "item" for key, _ in members):
        return [value for _, value in members]
    return dict(members)


def _typed(text: str, schema: Any) -> Any:
    """Returns the value of a text between tags: a text if the schema says so or says nothing."""
    kinds = schema.get("type") if isinstance(schema, dict) else None
    kinds = [kinds] if isinstance(kinds, str) else kinds or []
    if not kinds or "string" in kinds:
        return text
    with suppress(ValueError):
        return json.loads(text)
    return [] if kinds == ["array"] and not text.strip() else text


def parse_longcat(text: str, tools: Any = None) -> Any:
    """Parses calls in Longcat's format, which without arguments are a name alone."""
    if text.lstrip().startswith(("{", "[")):
        return parse_json_calls(text)
    if MARKUPS["longcat"].argument not in text:
        return {"name": text.strip(), "arguments": {}}
    whole = [{"function": {"parameters": None, **tool["function"]}} for tool in tools or []]
    return parse_markup(longcat.parse_tool_call, MARKUPS["longcat"], text, whole)


def read_longcat(source: Source, target: Target) -> Reading[None]:
    """Reads tool calls in Longcat's format, in which a call has its arguments between markers or is
    a JSON object with ``name`` and ``arguments``."""
    if (yield from source.skip_space()) in "{[":
        yield from read_json_calls(source, target)
    else:
        yield from read_markup(MARKUPS["longcat"], source, target)


def read_markup(markup: Markup, source: Source, target: Target) -> Reading[None]:
    """Reads tool calls in the format that ``markup`` describes, and passes them to ``target`` piece
    by piece."""
    end = -1
    while True:
        if markup.call:
            yield from source.until(nowhere, markup.call)
        if end >= 0:
            target.split(end, end)
        header: list[str] = []
        yield from source.until(header.append, markup.named or markup.argument)
        if not markup.named:
            source.at -= len(markup.argument)
        call = _Call(markup, f"{markup.call}{''.join(header)}{markup.named}", source, target)
        yield from call.read()
        end = source.position


class _Call:
    """A tool call that is read from ``source`` and passed to ``target`` piece by piece. ``header``
    is the call's text before its first argument."""

    def __init__(self, markup: Markup, header: str, source: Source, target: Target) -> None:
        self._markup = markup
        self._header = header
        self._source = source
        self._target = target
        self._keys: set[str] = set()

    def read(self) -> Reading[None]:
        """Reads the call's arguments, up to and including the call's end marker; in a format
        without an end marker, as long as text comes."""
        markup = self._markup
        others = [markup.ended] if markup.ended else []
        if markup.call == MARKUPS["kimi_k3"].call:
            others.append(_BLOCK)
        while True:
            found = yield from self._source.until(nowhere, markup.argument, *others)
            if found == markup.argument:
                yield from self._read_argument()
            elif found == _BLOCK:
                yield from self._read_block()
                return
            else:
                return

    def _read_block(self) -> Reading[None]:
        if self._keys:
            raise GiveUp
        end = self._markup.ended
        name, _ = self._target.parse(f"{self._header}{_BLOCK}<|sep|>{{}}<|close|>json<|sep|>{end}")
        yield from self._source.until(nowhere, "<|sep|>")
        yield from self._source.skip_space()
        yield from read_arguments(self._source, self._target, name)
        yield from self._source.until(nowhere, end)

    def _read_argument(self) -> Reading[None]:
        markup, source = self._markup, self._source
        pieces: list[str] = []
        yield from source.until(pieces.append, markup.keyed)
        before = f"{self._header}{markup.argument}{''.join(pieces)}{markup.keyed}"
        if markup.middle:
            pieces.clear()
            yield from source.until(pieces.append, markup.middle)
            if not re.fullmatch(r"(?:\\n|\s)*", "".join(pieces)):
                raise GiveUp
            before += markup.middle
        after = f"{markup.closed}{markup.ended}"

        def read(text: str) -> tuple[str, str, Any]:
            """Returns the name, the key and the value that the parser finds in a call whose only
            argument has the value ``text``. Raises GiveUp if the parser finds no such call."""
            name, arguments = self._target.parse(before + text + after)
            if len(arguments) != 1:
                raise GiveUp
            [(key, value)] = arguments.items()
            return name, key, value

        name, key, _ = read("null")
        self._begin(name, key)
        value = MarkupValue(
            self._target.add,
            lambda text: read(text)[2],
            trim=markup.trim,
            open_texts=markup.open_texts,
        )
        ends = [markup.ended] if markup.bounded else []
        if (yield from source.until(value.add, markup.closed, *ends)) != markup.closed:
            raise GiveUp
        value.close()

    def _begin(self, name: str, key: str) -> None:
        """Writes an argument's key; the first key begins the call. Raises GiveUp if a key comes
        twice."""
        if key in self._keys:
            raise GiveUp
        if not self._keys:
            self._target.begin(name)
        self._target.add(f"{', ' if self._keys else '{'}{json_text(key)}: ")
        self._keys.add(key)
