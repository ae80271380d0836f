"""Reads tool calls while they come, in the dialects that write arguments as JSON, as Python or as
Gemma does; :mod:`mayfly_worker.text.dialects.markup_readers` reads the others.

A reader follows the text of one or several calls, as far as that is certain, and tells a
:class:`Target` what it finds: a call's name, the text of its arguments in the form of
``json.dumps``, the place where the next call begins. The closing brace of the arguments is left
out. Text of an argument's string is passed on as it comes; any other value once it is whole, and as
the dialect's parser reads it from a small call that holds nothing else. Where the text goes on in a
way that cannot be followed, the reader raises GiveUp; the parser may still read the whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Protocol

from mayfly_worker.text.json_pieces import (
    GiveUp,
    Reading,
    Source,
    json_text,
    nowhere,
    read_object,
    string_text,
)


class NoCall(GiveUp):
    """A text is certainly no call, whatever follows."""


class Target(Protocol):
    """Receiver of what a reader finds in the text of tool calls: names, arguments, and the places
    where calls end and begin."""

    def begin(self, name: str, id: str | None = None) -> None:
        """Begins a call of the tool ``name``, to which the model gave an ``id`` or none. Raises
        NoCall if the request has no such tool."""

    def check(self, name: str) -> None:
        """Raises NoCall if the request has no tool ``name``."""

    def add(self, arguments: str) -> None:
        """Takes the next piece of the arguments, a JSON object as text, of the call that was begun
        last."""

    def split(self, end: int, start: int, *, listed: bool = False) -> None:
        """Ends a call at the position ``end`` of the text; the next call begins at ``start``.
        ``listed`` says that the calls are elements of a list, with brackets around all of them."""

    def parse(self, text: str) -> tuple[str, dict[str, Any]]:
        """Returns the name and the arguments of the only call in a text, as the dialect's
        parser reads it. Raises GiveUp if the parser finds no call, or several."""


ParseCalls = Callable[[str, Any], Any]
"""Function ``parse(text, tools)`` that returns the calls in a text, between the markers that begin
and end calls: a dictionary with ``name``, ``arguments`` and perhaps the model's own ``id`` of the
call, or a list of these. ``tools`` are the request's tools in OpenAI's form. Raises any exception
for a text that is no call; its result is checked by the caller."""

Reader = Callable[[Source, Target], Reading[None]]
"""Function that follows a text as its pieces come into the source, and tells the target of the
calls in it."""


def read_arguments(
    source: Source, target: Target, name: str, id: str | None = None
) -> Reading[None]:
    """Reads a call's arguments and passes them to ``target``. Raises GiveUp if no JSON object
    comes."""
    if (yield from source.peek()) != "{":
        raise GiveUp
    target.begin(name, id)
    yield from read_object(source, target.add)


# Dialects whose arguments are written like keyword arguments


def value_of(target: Target, text: str) -> tuple[str, str]:
    """Returns the key, and the value as JSON, of the only argument of the call in ``text``. Raises
    GiveUp if the call has none or several, or JSON cannot express the value."""
    _, arguments = target.parse(text)
    if len(arguments) != 1:
        raise GiveUp
    [(key, value)] = arguments.items()
    written = json_text(value)
    if written is None:
        raise GiveUp
    return key, written


class KeywordArguments:
    """Writes the arguments of one call to ``target``, one by one, as a JSON object."""

    def __init__(self, target: Target, name: str) -> None:
        self._target = target
        self._name = name
        self._keys: set[str] = set()

    def begin(self, key: str) -> None:
        """Writes an argument's key; the first key begins the call. Raises GiveUp if a key comes
        twice."""
        if key in self._keys:
            raise GiveUp
        if not self._keys:
            self._target.begin(self._name)
        self._target.add(f"{', ' if self._keys else '{'}{json_text(key)}: ")
        self._keys.add(key)

    def add(self, call: str) -> None:
        """Writes the key and the value of the only argument in the text of a small ``call``."""
        key, value = value_of(self._target, call)
        self.begin(key)
        self._target.add(value)


def read_function_gemma(source: Source, target: Target) -> Reading[None]:
    """Reads FunctionGemma's ``call:name{key:<escape>text<escape>,key:value}``; only the first call
    counts, and the first closing brace ends the call."""
    yield from source.until(nowhere, "call:")
    name: list[str] = []
    yield from source.until(name.append, "{")
    called = f"call:{''.join(name)}{{"
    arguments = KeywordArguments(target, "".join(name))
    while True:
        key: list[str] = []
        if (yield from source.until(key.append, ":", "}")) == "}":
            return
        argument = f"{called}{''.join(key)}:"
        if (yield from _follows(source, "<escape>")):
            arguments.begin(value_of(target, argument + "<escape><escape>}")[0])
            target.add('"')
            sink = string_sink(target)
            if (yield from source.until(sink, "<escape>", "}")) == "}":
                raise GiveUp
            target.add('"')
            ending = yield from source.take()
        else:
            value: list[str] = []
            ending = yield from source.until(value.append, ",", "}")
            arguments.add(f"{argument}{''.join(value)}}}")
        if ending == "}":
            return


def string_sink(target: Target) -> Callable[[str], None]:
    return lambda text: target.add(string_text(text))


def _follows(source: Source, marker: str) -> Reading[bool]:
    """Returns True, and reads ``marker``, if the text goes on with it; otherwise reads nothing."""
    for at, wanted in enumerate(marker):
        while source.at + at >= len(source.text):
            yield
        if source.text[source.at + at] != wanted:
            return False
    source.at += len(marker)
    return True


_GEMMA_STRING = '<|"|>'
_GEMMA_KEY = re.compile(r"[^:{}<]+")


def read_gemma4(source: Source, target: Target) -> Reading[None]:
    """Reads one or several calls of Gemma 4: ``call:name{key:<|"|>text<|"|>,key:value}``."""
    end = -1
    while True:
        yield from source.until(nowhere, "call:")
        name: list[str] = []
        yield from source.until(name.append, "{")
        if end >= 0:
            target.split(end, end)
        yield from _read_gemma4_arguments(source, target, "".join(name))
        end = source.position


def _read_gemma4_arguments(source: Source, target: Target, name: str) -> Reading[None]:
    called = f"call:{name}{{"
    arguments = KeywordArguments(target, name)
    if (yield from source.peek()) == "}":
        source.at += 1
        return
    while True:
        key: list[str] = []
        yield from source.run(_GEMMA_KEY, key.append)
        yield from source.expect(":")
        argument = f"{called}{''.join(key)}:"
        if (yield from _follows(source, _GEMMA_STRING)):
            arguments.begin(value_of(target, f"{argument}{_GEMMA_STRING * 2}}}")[0])
            target.add('"')
            yield from source.until(string_sink(target), _GEMMA_STRING)
            target.add('"')
            ending = yield from source.skip_space()
            source.at += 1
        else:
            value: list[str] = []
            ending = yield from read_nested(
                source, value, {_GEMMA_STRING: _GEMMA_STRING}, escapes=False
            )
            arguments.add(f"{argument}{''.join(value)}}}")
        if ending == "}":
            return
        if ending != ",":
            raise GiveUp


_CONTAINERS = {"{": "}", "[": "]", "(": ")"}


def read_nested(
    source: Source, pieces: list[str], quotes: dict[str, str], *, escapes: bool
) -> Reading[str]:
    """Reads a value into ``pieces``, and the comma or closing bracket after it, which is returned.
    Commas and brackets within brackets, and within strings between ``quotes`` (opening to closing),
    belong to the value; with ``escapes``, a backslash in a string hides the next character."""
    open_brackets: list[str] = []
    while True:
        marks = [*_CONTAINERS, *_CONTAINERS.values(), ",", *quotes]
        mark = yield from source.until(pieces.append, *marks)
        if mark in quotes:
            pieces.append(mark)
            closing = quotes[mark]
            while (
                yield from source.until(pieces.append, closing, *(["\\"] if escapes else []))
            ) != closing:
                pieces.append("\\" + (yield from source.take()))
            pieces.append(closing)
        elif mark in _CONTAINERS:
            open_brackets.append(_CONTAINERS[mark])
            pieces.append(mark)
        elif not open_brackets:
            return mark
        else:
            if mark != "," and mark != open_brackets.pop():
                raise GiveUp
            pieces.append(mark)
