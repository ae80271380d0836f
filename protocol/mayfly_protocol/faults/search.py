"""Finding the table's signatures in texts.

::

    log line          ... cudaGraphLaunch(graph, stream) failed: an illegal memory access was ...
    cuda_sticky                                         '-----------------------------'
    cuda_graph_launch     '-----------------------------------'
    cuda_other            '-------------------------------------'

Signatures that overlap or touch are about one error, and the first of the table tells most of it.
Signatures apart from each other are different errors, and the earlier is the cause.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mayfly_protocol.faults.engine import CXX_ABORT
from mayfly_protocol.faults.kind import Kind


@dataclass(frozen=True, slots=True)
class Found:
    """``text``, at ``start``, matched the kind's signature. It lies in the line that begins at
    ``line_start``."""

    kind: Kind
    text: str
    start: int
    line_start: int

    @property
    def end(self) -> int:
        return self.start + len(self.text)


def find_all(text: str, kinds: Iterable[Kind]) -> list[Found]:
    """The first error that each line of ``text`` names, from its first line to its last.

    ``cxx_abort`` counts only where a line names nothing else: it says no more than that the rest
    of the line was not caught.

    Linear in the text's length: no signature looks further than a few hundred characters.
    """
    lines: dict[int, list[Found]] = {}
    for kind in kinds:
        for found in _matches(kind, text):
            lines.setdefault(found.line_start, []).append(found)
    return [_first(lines[start]) for start in sorted(lines)]


def _matches(kind: Kind, text: str) -> Iterator[Found]:
    if kind.signature is None:
        return
    line_start = 0
    for match in kind.signature.finditer(text):
        # Searched from the line before, not from the text's start: one line may hold thousands.
        line_start = max(line_start, text.rfind("\n", line_start, match.start()) + 1)
        yield Found(kind, match[0], match.start(), line_start)


def _first(found: list[Found]) -> Found:
    """Of one line's, which come in the table's order."""
    named = [each for each in found if each.kind is not CXX_ABORT] or found
    start = min(each.start for each in named)
    end = max(each.end for each in named if each.start == start)
    return next(each for each in named if each.start <= end)
