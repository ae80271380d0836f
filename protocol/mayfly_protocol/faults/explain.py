"""Search for the known faults in a log of any length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO

from mayfly_protocol.faults.classify import MESSAGES, TABLE, find_signatures
from mayfly_protocol.faults.engine import CXX_ABORT
from mayfly_protocol.faults.kinds import Kind

CHUNK = 256 * 1024
"""Characters of a log that are read at a time."""
OVERLAP = 2048
"""Characters that two chunks of a log share where a line is longer than a chunk; no text by which a
fault is recognised is longer."""
EXCERPT = 300
"""Largest number of characters of a log line that are shown, counted from the fault's signature."""
INNER_TEXT_WITHIN = 3
"""Number of log lines after C++'s ``terminate called`` (an uncaught exception) in which the
exception's own text is searched for."""


@dataclass(frozen=True, slots=True)
class LogFault:
    """A fault found in line number ``line`` of a log, counted from 1."""

    kind: Kind
    line: int
    excerpt: str


@dataclass(frozen=True, slots=True)
class LaterFault:
    """A kind of fault found ``count`` times in a log after the log's first fault, for the first
    time in line number ``line``."""

    kind: Kind
    line: int
    count: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """The first fault of a log, and the faults after it, counted by kind."""

    first: LogFault
    later: tuple[LaterFault, ...]


def explain(log: TextIO) -> Explanation | None:
    """Finds the first fault of a log or a traceback, and counts the faults after it by kind.

    Returns None if no line names a known fault. Memory stays bounded, however long the log or a
    line is.
    """
    found = find_faults(log)
    first = next(found, None)
    if first is None:
        return None
    later: dict[str, LaterFault] = {}
    for each in found:
        before = later.get(each.kind.name, LaterFault(each.kind, each.line, 0))
        later[each.kind.name] = LaterFault(each.kind, before.line, before.count + 1)
    return Explanation(first, tuple(later.values()))


def find_faults(log: TextIO) -> Iterator[LogFault]:
    """Yields a fault for every log line that names a fault. An uncaught C++ exception and the lines
    with the exception's text are one fault."""
    uncaught: LogFault | None = None
    for each in _faults_by_line(log):
        if uncaught is not None and not _belongs_to(each, uncaught):
            yield uncaught
        uncaught = each if each.kind is CXX_ABORT else None
        if uncaught is None:
            yield each
    if uncaught is not None:
        yield uncaught


def _belongs_to(each: LogFault, uncaught: LogFault) -> bool:
    near = each.line - uncaught.line <= INNER_TEXT_WITHIN
    return near and each.kind in MESSAGES and each.kind is not CXX_ABORT


def _faults_by_line(log: TextIO) -> Iterator[LogFault]:
    line, seen = 1, 0
    for chunk, whole in _chunks(log):
        counted = 0
        for found in find_signatures(chunk, TABLE):
            if found.start >= whole:
                break
            line += chunk.count("\n", counted, found.line_start)
            counted = found.line_start
            if line > seen:  # a line too long for one chunk counts once
                yield LogFault(found.kind, line, _excerpt(chunk, found.start))
                seen = line
        line += chunk.count("\n", counted)


def _chunks(log: TextIO) -> Iterator[tuple[str, int]]:
    """Splits a log into chunks. Yields each chunk with the length of its first part: a signature
    (text of a fault) that begins in this part is surely whole.

    A chunk ends at the end of a line. If a line is too long, chunks overlap; a signature that
    begins in the overlap is left to the next chunk, which holds all of the signature.
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
    """Returns a log line from ``start`` on, without characters that would control a terminal."""
    line = text[start : start + EXCERPT].partition("\n")[0].rstrip()
    return "".join(c if c.isprintable() else "�" for c in line)
