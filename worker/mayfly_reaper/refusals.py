"""How often a node refused somebody something, at all of its sockets together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping


class Tally:
    """Adds up what the reaper counts itself (``own``, which grows) and what its workers report.
    A worker's count goes on counting when it is gone."""

    def __init__(self, own: Mapping[str, int]) -> None:
        self._own = own
        self._living: dict[int, Counter[str]] = {}
        self._gone: Counter[str] = Counter()

    def report(self, incarnation: int, counts: Mapping[str, int]) -> None:
        """What a worker that lives has refused so far. A report that came late takes nothing
        back."""
        if counts:
            known = self._living.setdefault(incarnation, Counter())
            known |= Counter(counts)

    def gone(self, incarnation: int) -> None:
        """A worker that will report no more."""
        self._gone += self._living.pop(incarnation, Counter())

    def total(self) -> dict[str, int]:
        """By reason."""
        everything = Counter(self._own) + self._gone
        for counts in self._living.values():
            everything += counts
        return dict(everything)
