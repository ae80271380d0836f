"""Values of a tool call's arguments that come in pieces, as text between markers.

A value is text or something else (a number, a list, ...). The request's schema, a mark beside the
value or the value itself says which, by rules of each format's own. These rules show in what
mlx-lm's parser makes of a few short values: if ``1`` stays text, almost every other value does,
too. Text is passed on as it comes, once the value can be nothing else; any other value is passed on
once it is whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal

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

OpenTexts = Literal["json", "literal", ""]
"""Rule by which a format tells texts from other values if the request's schema does not. ``json``:
a value that is no JSON is text; ``literal``: a value that is no literal of Python or JSON is text;
empty: nothing can be told before the value's end."""


class Trim:
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
        """Ends the text. Raises GiveUp if something was left out that belongs to the text, such as
        the beginning of a CDATA section that has no end."""


class TrimLines(Trim):
    """Leaves out one newline at each end of a text that comes in pieces."""

    def __call__(self, text: str) -> None:
        if not self._begun and text:
            self._begun = True
            text = text.removeprefix("\n")
        if text:
            text = "".join((*self._held, text))
            self._held = ["\n"] if text[-1] == "\n" else []
            self._sink(text[:-1] if self._held else text)


class TrimNothing(Trim):
    """Passes a text on as it is, including white space at its ends."""

    def __call__(self, text: str) -> None:
        self._sink(text)


_DATA, _DATA_END = "<![CDATA[", "]]>"


class TrimData(Trim):
    """Leaves out white space at both ends of a text that comes in pieces; of a text that is a CDATA
    section, passes on only the section's content."""

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
        """Passes on the content of a CDATA section, without what could be the section's end marker
        with white space after it."""
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


class MarkupValue:
    """One argument's value, which comes in pieces and is written to ``sink`` as JSON. ``read``
    returns the value that mlx-lm's parser makes of a text; ``trim`` leaves out what surrounds a
    text, such as white space; ``open_texts`` is the rule by which texts are told from other values
    if the request's schema does not say."""

    def __init__(
        self, sink: Sink, read: Callable[[str], Any], *, trim: type[Trim], open_texts: OpenTexts
    ) -> None:
        self._sink = sink
        self._read = read
        self._trim = trim(lambda text: sink(string_text(text)))
        self._held: list[str] = []
        self._decide = _decider(read, open_texts)
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
        """Ends the argument's value. Raises GiveUp if mlx-lm's parser finds no value in the text,
        or a value that JSON cannot express."""
        if self._decision:
            self._trim.close()
            self._sink('"')
            return
        text = json_text(self._read("".join(self._held)))
        if text is None:
            raise GiveUp
        self._sink(text)


_Decide = Callable[[str], bool | None]
"""Function that takes the pieces of a value one by one, beginning with an empty piece. Returns True
once the value is certainly a text, False once it is clear that only the value's end can tell, None
before."""


def _decider(read: Callable[[str], Any], open_texts: OpenTexts) -> _Decide:
    def kept(text: str) -> bool:
        try:
            return bool(read(text) == text)
        except GiveUp:
            return False

    if kept("1"):
        words = [word for word in ("null", "none", "nil") if not kept(word)]
        return _NoWord(words, containers=not kept("{}"))
    if open_texts == "json":
        return _NoJson()
    if open_texts == "literal":
        return _NoLiteral()
    return lambda text: False


class _NoWord:
    """Decides that a value is a text as soon as it cannot become one of ``words``, such as null;
    with ``containers``, only the end can tell for a value that begins like a list or an object."""

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
    """Decides that a value is a text as soon as it cannot be JSON."""

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
    """Decides that a value is a text as soon as its beginning can be neither JSON nor a literal of
    Python."""

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
