"""The faults in a log, of any length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO

from mayfly_protocol.faults.classify import MESSAGES, TABLE, find_all
from mayfly_protocol.faults.engine import CXX_ABORT
from mayfly_protocol.faults.kinds import Kind

CHUNK = 256 * 1024
"""Characters read at a time."""
OVERLAP = 2048
"""Characters of a line longer than a chunk that are looked at twice; more than any signature
reaches."""
EXCERPT = 300
"""Characters shown of a line, from the signature on."""
INNER_TEXT_WITHIN = 3
"""So many lines behind ``terminate called`` stands what the exception said, if anywhere."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """A kind's signature in line ``line``, counted from 1."""

    kind: Kind
    line: int
    excerpt: str


@dataclass(frozen=True, slots=True)
class Later:
    """A kind that was found ``count`` times after the first fault, at first in line ``line``."""

    kind: Kind
    line: int
    count: int


@dataclass(frozen=True, slots=True)
class Explanation:
    first: Sighting
    later: tuple[Later, ...]


def explain(log: TextIO) -> Explanation | None:
    """The first fault of a log or a traceback, and by kind how often others came after it.

    None where nothing is recognised. Memory stays bounded, however long the log or a line is.
    """
    found = sightings(log)
    first = next(found, None)
    if first is None:
        return None
    later: dict[str, Later] = {}
    for each in found:
        before = later.get(each.kind.name, Later(each.kind, each.line, 0))
        later[each.kind.name] = Later(each.kind, before.line, before.count + 1)
    return Explanation(first, tuple(later.values()))


def sightings(log: TextIO) -> Iterator[Sighting]:
    """Every line that names a fault. An uncaught C++ exception and the lines that say what it was
    are one."""
    uncaught: Sighting | None = None
    for each in _lines_that_name(log):
        if uncaught is not None and not _says_what(each, uncaught):
            yield uncaught
        uncaught = each if each.kind is CXX_ABORT else None
        if uncaught is None:
            yield each
    if uncaught is not None:
        yield uncaught


def _says_what(each: Sighting, uncaught: Sighting) -> bool:
    near = each.line - uncaught.line <= INNER_TEXT_WITHIN
    return near and each.kind in MESSAGES and each.kind is not CXX_ABORT


def _lines_that_name(log: TextIO) -> Iterator[Sighting]:
    line, seen = 1, 0
    for chunk, whole in _chunks(log):
        counted = 0
        for found in find_all(chunk, TABLE):
            if found.start >= whole:
                break
            line += chunk.count("\n", counted, found.line_start)
            counted = found.line_start
            if line > seen:  # a line too long for one chunk counts once
                yield Sighting(found.kind, line, _excerpt(chunk, found.start))
                seen = line
        line += chunk.count("\n", counted)


def _chunks(log: TextIO) -> Iterator[tuple[str, int]]:
    """The log in pieces, each with the number of its characters from which on it may be cut short.

    A piece ends where a line does. Where a line is too long, pieces overlap, and what begins in
    the overlap is left to the next one, which has all of it.
    """
    rest = ""
    while block := log.read(CHUNK):
        text = rest + block
        end = text.rfind("\n") + 1
        if end:
            yield text[:end], end
            rest = text[end:]
        elif len(text) > CHUNK:
            yield text, len(text) - OVERLAP
            rest = text[-OVERLAP:]
        else:
            rest = text
    if rest:
        yield rest, len(rest)


def _excerpt(text: str, start: int) -> str:
    """The line from ``start`` on, with nothing in it that would steer a terminal."""
    line = text[start : start + EXCERPT].partition("\n")[0].rstrip()
    return "".join(c if c.isprintable() else "�" for c in line)
