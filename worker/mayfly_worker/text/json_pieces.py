"""Reads JSON from a text that comes in pieces, and writes it piece by piece, in the form that
``json.dumps`` gives the whole value.

A :class:`Source` holds the text that has come and was not read yet. Readers are generators over a
source: a reader yields when it needs more text, and is resumed after :meth:`Source.feed`. Each
character is read once, so that a text takes time in proportion to its length, however it is cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from typing import Any, TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
"""A reader of a text that comes in pieces: a generator that yields when it needs more text, and
returns a ``T`` at its end."""

Sink = Callable[[str], Any]
"""Function that takes the next piece of a text."""

MAX_DEPTH = 100

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_LITERAL = re.compile(r"[-+.0-9A-Za-z]+")
_SURROGATE = re.compile("[\ud800-\udfff]")
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
SPACE = " \t\n\r"


class GiveUp(Exception):
    """A text goes on in a way that cannot be followed piece by piece, so that it can only be parsed
    as a whole, once it has ended."""


class NotJson(GiveUp):
    """The text read so far cannot be the beginning of JSON, whatever follows."""


def json_text(value: Any) -> str | None:
    """Returns a value as JSON text; None for a value that JSON cannot express, such as the sets,
    bytes and NaN that parsers of tool calls make."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return None
    return _sendable(text)


def string_text(text: str) -> str:
    """Returns a part of a string as it is written between the quotes in JSON."""
    return _sendable(json.dumps(text, ensure_ascii=False)[1:-1])


def _sendable(text: str) -> str:
    """Returns JSON text with a JSON escape in place of each half of a surrogate pair, which UTF-8
    cannot encode."""
    if text.isascii():
        return text
    return _SURROGATE.sub(lambda found: f"\\u{ord(found.group()):04x}", text)


def nowhere(text: str) -> None:
    """Drops a piece of text that is not needed: the sink for such text."""


class Source:
    """A text that comes in pieces, by :meth:`feed`, and is read while it comes: ``text`` from
    ``at`` on has come and was not read yet. The reading methods are generators that yield when they
    need more text."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self._before = 0

    @property
    def position(self) -> int:
        """Number of characters read since the text's beginning."""
        return self._before + self.at

    def feed(self, text: str) -> None:
        self._before += self.at
        self.text = self.text[self.at :] + text
        self.at = 0

    def peek(self) -> Reading[str]:
        """Returns the next character, which stays unread."""
        while self.at >= len(self.text):
            yield
        return self.text[self.at]

    def take(self) -> Reading[str]:
        """Reads the next character and returns it."""
        character = yield from self.peek()
        self.at += 1
        return character

    def skip_space(self, space: str = SPACE) -> Reading[str]:
        """Reads white space; returns the first other character, which stays unread."""
        while (character := (yield from self.peek())) in space:
            self.at += 1
        return character

    def expect(self, wanted: str, error: type[GiveUp] = GiveUp) -> Reading[None]:
        """Reads the text ``wanted``. Raises ``error`` as soon as another character comes."""
        for character in wanted:
            if (yield from self.take()) != character:
                raise error

    def run(self, pattern: re.Pattern[str], sink: Sink) -> Reading[str]:
        """Reads characters while a pattern of single characters (such as ``[a-z]+``) matches them,
        and passes them to ``sink``; returns the character after them, which stays unread."""
        while True:
            yield from self.peek()
            found = pattern.match(self.text, self.at)
            if found is None:
                return self.text[self.at]
            sink(found.group())
            self.at = found.end()

    def until(self, sink: Sink, *markers: str) -> Reading[str]:
        """Reads up to and including the first of ``markers`` that comes, and returns this marker.
        ``sink`` takes the text before the marker, each piece as soon as no marker can begin in the
        piece."""
        while True:
            first, end = "", len(self.text)
            for marker in markers:
                found = self.text.find(marker, self.at, end + len(marker) - 1 if first else end)
                if found >= 0 and (not first or found < end):
                    first, end = marker, found
            if not first:
                end -= max(self._begun(marker) for marker in markers)
            if end > self.at:
                sink(self.text[self.at : end])
            self.at = end + len(first)
            if first:
                return first
            yield

    def _begun(self, marker: str) -> int:
        """Returns how many characters at the end of the text that has come could be the beginning
        of ``marker``."""
        text, length = self.text, len(self.text)
        begin = text.find(marker[0], max(self.at, length - len(marker) + 1))
        while begin >= 0 and not marker.startswith(text[begin:]):
            begin = text.find(marker[0], begin + 1)
        return length - begin if begin >= 0 else 0


def read_value(source: Source, sink: Sink, *, unique: bool = True, depth: int = 0) -> Reading[None]:
    """Reads one JSON value and writes it to ``sink``.

    Raises:
        NotJson: the value is no JSON.
        GiveUp: the value is nested too deeply, or contains NaN or an infinite number; or, if keys
            have to be ``unique``, an object has a key twice: the last value would count, but the
            first has been written.
    """
    character = yield from source.skip_space()
    if character == '"':
        yield from read_string(source, sink)
    elif character == "{":
        yield from read_object(source, sink, unique=unique, depth=depth)
        sink("}")
    elif character == "[":
        yield from _read_list(source, sink, unique=unique, depth=depth)
    else:
        yield from _read_literal(source, sink)


def read_object(
    source: Source, sink: Sink, *, unique: bool = True, depth: int = 0
) -> Reading[None]:
    """Reads a JSON object, and writes all of it but the closing brace to ``sink``. Raises NotJson
    if the text is no JSON object; GiveUp if it is nested too deeply, contains NaN or an infinite
    number, or, if keys have to be ``unique``, has a key twice."""
    if depth > MAX_DEPTH:
        raise GiveUp
    yield from source.expect("{", NotJson)
    sink("{")
    if (yield from source.skip_space()) == "}":
        source.at += 1
        return
    keys: set[str] = set()
    separator = ""
    while True:
        yield from source.skip_space()
        pieces: list[str] = []
        yield from read_string(source, pieces.append)
        key = "".join(pieces)
        if unique and key in keys:
            raise GiveUp
        keys.add(key)
        yield from source.skip_space()
        yield from source.expect(":", NotJson)
        sink(f"{separator}{key}: ")
        yield from read_value(source, sink, unique=unique, depth=depth + 1)
        if (yield from _read_separator(source, "}")) == "}":
            return
        separator = ", "


def _read_list(source: Source, sink: Sink, *, unique: bool, depth: int) -> Reading[None]:
    if depth > MAX_DEPTH:
        raise GiveUp
    source.at += 1
    sink("[")
    if (yield from source.skip_space()) == "]":
        source.at += 1
        sink("]")
        return
    while True:
        yield from read_value(source, sink, unique=unique, depth=depth + 1)
        if (yield from _read_separator(source, "]")) == "]":
            sink("]")
            return
        sink(", ")


def _read_separator(source: Source, closing: str) -> Reading[str]:
    """Reads and returns the character after a member of a list or an object: a comma, or the
    ``closing`` bracket. Raises NotJson for any other character."""
    character = yield from source.skip_space()
    if character not in ("," + closing):
        raise NotJson
    source.at += 1
    return character


def read_string(source: Source, sink: Sink) -> Reading[None]:
    """Reads a JSON string, and writes it to ``sink`` as its characters come. Line ends and other
    control characters, which JSON forbids and models write, are taken. Raises NotJson if the text
    is no JSON string."""
    yield from source.expect('"', NotJson)
    sink('"')
    while True:
        character = yield from source.run(_PLAIN, lambda plain: sink(_sendable(plain)))
        source.at += 1
        if character == '"':
            sink('"')
            return
        escaped = (yield from _read_escape(source)) if character == "\\" else character
        sink(string_text(escaped))


def _read_escape(source: Source) -> Reading[str]:
    escape = yield from source.take()
    if escape != "u":
        if escape not in _ESCAPES:
            raise NotJson
        return _ESCAPES[escape]
    unit = yield from _read_unit(source)
    if not 0xD800 <= unit < 0xDC00:
        return chr(unit)
    # The first half of a pair, if the second one follows.
    for at, wanted in enumerate("\\u"):
        while source.at + at >= len(source.text):
            yield
        if source.text[source.at + at] != wanted:
            return chr(unit)
    while source.at + 6 > len(source.text):
        yield
    start = source.at
    source.at += 2
    second = yield from _read_unit(source)
    if 0xDC00 <= second < 0xE000:
        return chr(0x10000 + ((unit - 0xD800) << 10) + (second - 0xDC00))
    source.at = start
    return chr(unit)


def _read_unit(source: Source) -> Reading[int]:
    """Reads the four hexadecimal digits of a JSON escape; returns their value."""
    digits = ""
    while len(digits) < 4:
        digit = yield from source.take()
        if digit not in "0123456789abcdefABCDEF":
            raise NotJson
        digits += digit
    return int(digits, 16)


def _read_literal(source: Source, sink: Sink) -> Reading[None]:
    """Reads a number, ``true``, ``false`` or ``null``, and writes it to ``sink`` once the character
    after it has come. Raises NotJson as soon as the text cannot become one of these; GiveUp for NaN
    and infinite numbers."""
    pieces: list[str] = []

    def add(piece: str) -> None:
        pieces.append(piece)
        if piece[0].isalpha() or pieces[0][0].isalpha():
            begun = "".join(pieces)
            numeral = begun[0].isdigit() or begun[0] == "-"
            words = ("true", "false", "null", "NaN", "Infinity")
            if not numeral and not any(word.startswith(begun) for word in words):
                raise NotJson

    yield from source.run(_LITERAL, add)
    try:
        value = json.loads("".join(pieces))
    except ValueError:
        raise NotJson from None
    text = json_text(value)
    if text is None:
        raise GiveUp
    sink(text)
