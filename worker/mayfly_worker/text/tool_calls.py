"""Parses tool calls from the text that a model writes: each as a whole, or in pieces while its text
is generated."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from mayfly_worker.text.dialects.call_readers import NoCall
from mayfly_worker.text.dialects.dialect import Dialect
from mayfly_worker.text.json_pieces import GiveUp, Reading, Source, json_text


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A tool call that a model wrote. ``arguments`` is a JSON object as text; ``id`` is the id that
    the model gave the call, if its dialect has ids."""

    name: str
    arguments: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A part of a tool call. The call's first piece has its ``name`` and, if the model wrote one,
    its ``id``; the ``arguments`` of all its pieces together are a JSON object as text.
    ``unfinished`` says that the call ends with this piece, without being whole."""

    arguments: str
    name: str | None = None
    unfinished: bool = False
    id: str | None = None


class ToolCallParser:
    """Parses calls of one request's ``tools``, which a model writes in a ``dialect``."""

    def __init__(self, tools: Collection[dict[str, Any]], dialect: Dialect) -> None:
        self._tools = list(tools)
        self.names = frozenset(tool["function"]["name"] for tool in tools)
        self._dialect = dialect
        self.read = dialect.read
        self.bare = dialect.bare
        self.kept = dialect.kept
        self.json = dialect.json

    def parse(self, text: str) -> list[ParsedCall]:
        """Returns the calls in a text; an empty list unless every call has the name of one of the
        tools and an object as its arguments."""
        parsed = self.values(text)
        calls = [self._call(one) for one in (parsed if isinstance(parsed, list) else [parsed])]
        return [] if None in calls else [call for call in calls if call is not None]

    def values(self, text: str) -> Any:
        """Returns the calls that the parser of the model's dialect finds in a text, unchecked: a
        dictionary or a list of them; None if the parser cannot read the text."""
        try:
            return self._dialect.parse(text, self._tools)
        except Exception:
            # The parsers raise anything on malformed text: ValueError, AttributeError,
            # TypeError, RecursionError, MemoryError from ast. All of it means: not a call.
            return None

    def _call(self, parsed: Any) -> ParsedCall | None:
        if not isinstance(parsed, dict):
            return None
        name, arguments = parsed.get("name"), parsed.get("arguments")
        if not isinstance(name, str) or name not in self.names or not isinstance(arguments, dict):
            return None
        text = json_text(arguments)
        if text is None:
            return None
        id = parsed.get("id")
        return ParsedCall(name, text, id if isinstance(id, str) and id else None)


_MARKS = re.compile(r'\\.|"', re.DOTALL)
"""In JSON, what an escape hides, and the quotes around strings."""


class CallText:
    """The text of one or several tool calls, which comes in pieces, and the calls found in it.

    The reader of the dialect follows the text. It finds where a call ends, and with ``early``,
    pieces of a call are given out as it finds them. The parser of the dialect has the last word:
    each call is parsed as a whole once its text has ended, and what the pieces lack is given out
    then. If the parser cannot read a call whose pieces were given out, or reads it otherwise, the
    text is ``broken``, and nothing may follow.

    ``pieces`` gathers the results until the caller empties it.
    """

    def __init__(self, parser: ToolCallParser | None, *, early: bool, parallel: bool) -> None:
        """Without ``parallel`` only the first call counts: ``full`` says that this call is whole,
        and the rest of the text is dropped."""
        self._parser = parser
        self._early = early
        self._parallel = parallel
        self._text: list[str] = []
        self._begins_at = 0
        self._opening = ""
        self._name: str | None = None
        self._id: str | None = None
        self._announced = False
        self._sent: list[str] = []
        self._new: list[str] = []
        self.pieces: list[CallPiece] = []
        self.counted = self.full = self.broken = self.no_call = False
        """``counted`` says that at least one call was given out, or a piece of one; ``full`` that
        no further call may come; ``broken`` that parts of a call were given out that turned out
        wrong; ``no_call`` that the reader found ``text`` to be no call."""
        self._source = Source()
        self._reading: Reading[None] | None = (
            parser.read(self._source, self) if parser is not None and parser.read else None
        )

    @property
    def text(self) -> str:
        """The text that is part of no finished call: that of the call that is open, or text that is
        no call."""
        return "".join(self._text)

    @property
    def in_string(self) -> bool:
        """True if the text is JSON and ends within a string."""
        if self._parser is None or not self._parser.json:
            return False
        return bool(sum(mark == '"' for mark in _MARKS.findall(self.text)) % 2)

    @property
    def foreign(self) -> bool:
        """True if the text does not even begin like a call."""
        read = self._source.position - self._begins_at
        return self.no_call and not self.counted and not self.text[:read].strip()

    @property
    def unreadable(self) -> bool:
        """True if nothing of the text was given out, and it is no call as it stands."""
        return not self.counted and not self._parse(self.text)

    def feed(self, text: str) -> None:
        if self.full or self.broken:
            return
        self._text.append(text)
        if self._reading is None:
            return
        self._source.feed(text)
        try:
            next(self._reading)
        except NoCall:
            self._reading = None
            self.no_call = not self._announced
            if self.no_call:
                self._name = None
                self._new.clear()
        except (GiveUp, StopIteration):
            self._reading = None
        self._flush()

    def end(self, *, whole: bool) -> None:
        """Ends the text. The text is parsed as calls only if it is ``whole``, that is, was not cut
        off."""
        if self.full or self.broken:
            return
        self._reading = None
        if calls := self._parse(self._opening + self.text) if whole else []:
            self._text.clear()
        self._take(calls)

    def _parse(self, text: str) -> list[ParsedCall]:
        return self._parser.parse(text) if self._parser is not None else []

    def _take(self, calls: list[ParsedCall]) -> None:
        """Gives out the parsed ``calls`` whole. If pieces of a call were given out before, the
        first of ``calls`` is this call, and only its rest is given out; if the call is missing or
        differs from its pieces, the text is broken."""
        if self._announced:
            sent = "".join(self._sent)
            if not calls or calls[0].name != self._name or not calls[0].arguments.startswith(sent):
                self.broken = True
                self._new.clear()
                self.pieces.append(CallPiece("", unfinished=True))
                return
            self.pieces.append(CallPiece(calls.pop(0).arguments[len(sent) :]))
            self.full = not self._parallel
        self._name, self._announced = None, False
        self._sent.clear()
        self._new.clear()
        for call in calls:
            if self.full:
                return
            self.counted = True
            self.pieces.append(CallPiece(call.arguments, call.name, id=call.id))
            self.full = not self._parallel

    def _flush(self) -> None:
        """With ``early``, adds the arguments that were found since the last piece to ``pieces``, as
        one piece. A call's first piece has its name and never an empty text, which clients take for
        an empty object."""
        if self._new and self._early:
            name, id = (None, None) if self._announced else (self._name, self._id)
            self.pieces.append(CallPiece("".join(self._new), name, id=id))
            self._sent += self._new
            self._new.clear()
            self._announced = self.counted = True

    # As the target of a reader

    def check(self, name: str) -> None:
        if self._parser is None or name not in self._parser.names:
            raise NoCall

    def begin(self, name: str, id: str | None = None) -> None:
        self.check(name)
        if self._name is not None:
            raise GiveUp
        self._name, self._id = name, id

    def add(self, arguments: str) -> None:
        self._new.append(arguments)

    def split(self, end: int, start: int, *, listed: bool = False) -> None:
        text = self.text
        calls = self._parse(self._opening + text[: end - self._begins_at] + ("]" if listed else ""))
        if not calls and not self._announced:
            raise GiveUp
        self._take(calls)
        if self.full or self.broken:
            raise GiveUp
        self._opening = "[" if listed else ""
        self._text = [text[start - self._begins_at :]]
        self._begins_at = start

    def parse(self, text: str) -> tuple[str, dict[str, Any]]:
        parsed = self._parser.values(text) if self._parser is not None else None
        if isinstance(parsed, list) and len(parsed) == 1:
            [parsed] = parsed
        match parsed:
            case {"name": str(name), "arguments": dict(arguments)}:
                return name, arguments
        raise GiveUp
