"""Reads tool calls while they come, in the formats of ``mlx_lm.tool_parsers`` that write each
argument between markers, as XML does.

A value is text or something else (a number, a list, ...). The request's schema, a mark beside the
value or the value itself says which, by rules of each format's own. What mlx-lm's parser makes of
a few short values tells them: where ``1`` stays text, everything else does, too. Text is passed on
as it comes once nothing else is possible, all other values once they are whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from mayfly_worker.text.call_readers import Target, read_arguments, read_json_calls
from mayfly_worker.text.json_pieces import (
    GiveUp,
    NotJson,
    Reading,
    Sink,
    Source,
    json_text,
    nowhere,
    read_value,
    string_text,
)


class _Trim:
    """Leaves out white space at both ends of a text that comes in pieces."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._begun = False
        self._held: list[str] = []

    def __call__(self, text: str) -> None:
        if not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
        if rest := text.rstrip():
            self._sink("".join((*self._held, rest)))
            self._held = [text[len(rest) :]]
        elif text:
            self._held.append(text)

    def close(self) -> None:
        """Ends the text. Raises GiveUp where too much was left out."""


class _TrimLines(_Trim):
    """Leaves out one newline at each end."""

    def __call__(self, text: str) -> None:
        if not self._begun and text:
            self._begun = True
            text = text.removeprefix("\n")
        if text:
            text = "".join((*self._held, text))
            self._held = ["\n"] if text[-1] == "\n" else []
            self._sink(text[:-1] if self._held else text)


class _TrimNothing(_Trim):
    """Passes a text on as it is."""

    def __call__(self, text: str) -> None:
        self._sink(text)


_DATA, _DATA_END = "<![CDATA[", "]]>"


class _TrimData(_Trim):
    """Leaves out white space at both ends, or all but the content of a CDATA section."""

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._head: str | None = ""
        self._data = False

    def __call__(self, text: str) -> None:
        if self._head is not None:
            text = (self._head + text).lstrip()
            if len(text) < len(_DATA) and _DATA.startswith(text):
                self._head = text
                return
            self._head = None
            self._data = text.startswith(_DATA)
            text = text.removeprefix(_DATA)
        if self._data:
            self._add_data(text)
        else:
            super().__call__(text)

    def _add_data(self, text: str) -> None:
        """Passes on all that cannot be the section's end with white space after it."""
        text = "".join((*self._held, text))
        bare = text.rstrip()
        content = text
        if bare.endswith(_DATA_END):
            content = bare.removesuffix(_DATA_END)
        elif bare == text:
            begun = next((n for n in (2, 1) if text.endswith(_DATA_END[:n])), 0)
            content = text[: len(text) - begun]
        self._held = [text[len(content) :]]
        if content:
            self._sink(content)

    def close(self) -> None:
        if self._head:
            super().__call__(self._head)
        elif self._data and not "".join(self._held).startswith(_DATA_END):
            raise GiveUp


@dataclass(frozen=True)
class Markup:
    """A format's markers. Where ``|`` stands for no text, a call is

        call | NAME | named | ARGUMENT | ... | ended | last

    and an argument

        argument | KEY | keyed | white space, middle | VALUE | closed

    ``ended`` is empty where there is one call only, ``named`` where the first argument follows the
    name directly; ``last`` is the end of the only call. ``bounded`` says that ``ended`` within a
    value ends the call, too. Texts that the schema leaves open are those that are no ``json`` or no
    ``literal`` of Python or JSON.
    """

    argument: str
    keyed: str
    closed: str
    call: str = ""
    named: str = ""
    ended: str = ""
    last: str = ""
    middle: str = ""
    bounded: bool = False
    trim: type[_Trim] = _Trim
    open_texts: Literal["json", "literal", ""] = ""


MARKUPS = {
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
        trim=_TrimNothing,
        open_texts="json",
    ),
    "longcat": Markup(
        "<longcat_arg_key>",
        "</longcat_arg_key>",
        "</longcat_arg_value>",
        middle="<longcat_arg_value>",
        open_texts="literal",
    ),
    "minicpm5": Markup("<param", ">", "</param>", named=">", trim=_TrimData),
    "minimax_m2": Markup(
        "<parameter name=",
        ">",
        "</parameter>",
        call="<invoke name=",
        named=">",
        ended="</invoke>",
        bounded=True,
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
        last="</function>",
        trim=_TrimLines,
    ),
}

_BLOCK = "<|open|>json"
"""Begins all arguments as one object, in Kimi K3's format."""


def read_longcat(source: Source, target: Target) -> Reading[None]:
    """Reads Longcat's format, or a call as :func:`read_json_calls` reads it."""
    if (yield from source.skip_space()) == "{":
        yield from read_json_calls(source, target)
    else:
        yield from read_markup(MARKUPS["longcat"], source, target)


def read_markup(markup: Markup, source: Source, target: Target) -> Reading[None]:
    """Reads calls in a format."""
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
    """One call. ``header`` is its text before the first argument."""

    def __init__(self, markup: Markup, header: str, source: Source, target: Target) -> None:
        self._markup = markup
        self._header = header
        self._source = source
        self._target = target
        self._keys: set[str] = set()

    def read(self) -> Reading[None]:
        """Reads up to the call's end marker, and over it; for ever where there is none."""
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
        after = f"{markup.closed}{markup.ended}{markup.last}"

        def read(text: str) -> tuple[str, str, Any]:
            """Name, key and value that the parser finds in a call with this text as its only
            argument's value."""
            name, arguments = self._target.parse(before + text + after)
            if len(arguments) != 1:
                raise GiveUp
            [(key, value)] = arguments.items()
            return name, key, value

        name, key, _ = read("null")
        self._begin(name, key)
        value = _Value(markup, self._target.add, lambda text: read(text)[2])
        ends = [markup.ended] if markup.bounded else []
        if (yield from source.until(value.add, markup.closed, *ends)) != markup.closed:
            raise GiveUp
        value.close()

    def _begin(self, name: str, key: str) -> None:
        """Writes a key; the call begins with its first one."""
        if key in self._keys:
            raise GiveUp
        if not self._keys:
            self._target.begin(name)
        self._target.add(f"{', ' if self._keys else '{'}{json_text(key)}: ")
        self._keys.add(key)


class _Value:
    """One argument's value. ``read`` gives the value that mlx-lm's parser makes of a text."""

    def __init__(self, markup: Markup, sink: Sink, read: Callable[[str], Any]) -> None:
        self._sink = sink
        self._read = read
        self._trim = markup.trim(lambda text: sink(string_text(text)))
        self._held: list[str] = []
        self._decide = _decider(markup, read)
        self._decision: bool | None = None
        self._note(self._decide(""))

    def add(self, text: str) -> None:
        if self._decision:
            self._trim(text)
            return
        self._held.append(text)
        if self._decision is None:
            self._note(self._decide(text))

    def _note(self, decision: bool | None) -> None:
        self._decision = decision
        if decision:
            self._sink('"')
            self._trim("".join(self._held))

    def close(self) -> None:
        """Ends the argument's value. Raises GiveUp if the text is no value, or one that JSON cannot
        express."""
        if self._decision:
            self._trim.close()
            self._sink('"')
            return
        text = json_text(self._read("".join(self._held)))
        if text is None:
            raise GiveUp
        self._sink(text)


_Decide = Callable[[str], bool | None]
"""Takes the pieces of a value, beginning with an empty one. Returns True once it is certainly a
text, False once only its end can tell, None before."""


def _decider(markup: Markup, read: Callable[[str], Any]) -> _Decide:
    def kept(text: str) -> bool:
        try:
            return bool(read(text) == text)
        except GiveUp:
            return False

    if kept("1"):
        words = [word for word in ("null", "none", "nil") if not kept(word)]
        return _NoWord(words, containers=not kept("{}"))
    if markup.open_texts == "json":
        return _NoJson()
    if markup.open_texts == "literal":
        return _NoLiteral()
    return lambda text: False


class _NoWord:
    """Decides for a text unless it is one of some words, or begins a container."""

    def __init__(self, words: list[str], *, containers: bool) -> None:
        self._words = words
        self._containers = containers
        self._head = ""

    def __call__(self, text: str) -> bool | None:
        if not self._words and not self._containers:
            return True
        self._head += text
        head = self._head.strip()
        if _DATA.startswith(head):
            return None
        if self._containers and head[0] in "{[":
            return False
        head = head.removeprefix(_DATA).removesuffix("\n").lower()
        return None if any(word.startswith(head) for word in self._words) else True


class _NoJson:
    """Decides for a text that is no JSON."""

    def __init__(self) -> None:
        self._source = Source()
        self._reading = self._read()

    def _read(self) -> Reading[None]:
        yield from read_value(self._source, nowhere, unique=False)
        yield from self._source.skip_space()

    def __call__(self, text: str) -> bool | None:
        self._source.feed(text)
        try:
            next(self._reading)
        except (NotJson, StopIteration):
            return True
        except GiveUp:
            return False
        return None


_WORDS = {"true", "false", "null", "NaN", "Infinity", "True", "False", "None"}
_FIRST_OF_LITERALS = "0123456789+-.\"'[({#\\_"


class _NoLiteral:
    """Decides for a text that is no JSON and no literal of Python's."""

    def __init__(self) -> None:
        self._head = ""

    def __call__(self, text: str) -> bool | None:
        self._head += text
        head = self._head.lstrip()
        if not head:
            return None
        if not head[0].isascii():
            return True
        if not head[0].isalpha():
            return head[0] not in _FIRST_OF_LITERALS
        word = re.match(r"\w+", head)
        assert word is not None
        if word.end() == len(head) <= max(map(len, _WORDS)):
            return None
        # A letter before a quote may be a prefix, as in b"...".
        return word[0] not in _WORDS and not (word.end() <= 3 and head[word.end()] in "\"'(")
