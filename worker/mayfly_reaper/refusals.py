"""How often a node refused somebody something, at all of its sockets together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping


class Tally:
    """Adds up what the reaper counts itself (``own``, which grows) and what its workers report.
    A worker's count goes on counting when it is gone."""

    def __init__(self, own: Mapping[str, int]) -> None:
        self._own = own
        self._reported: dict[int, Counter[str]] = {}

    def report(self, incarnation: int, counts: Mapping[str, int]) -> None:
        """What one worker has refused so far. A report that came late takes nothing back."""
        if counts:
            known = self._reported.setdefault(incarnation, Counter())
            known |= Counter(counts)

    def total(self) -> dict[str, int]:
        """By reason."""
        everything = Counter(self._own)
        for counts in self._reported.values():
            everything += counts
        return dict(everything)
