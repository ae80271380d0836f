"""Which request it is that workers die of.

A worker that dies names the requests of the forward pass that it died in. One of them may be the
culprit, or none: a GPU fails by itself, too. What a request has seen of deaths decides::

    first death             marked       it goes on at once, like all the others
    again, about there      suspect      it goes on under a flag: a worker runs one such at a time
    again, under the flag   condemned    an error, and nobody takes it again for a while
    NEAR tokens further on  as if nothing had happened

"About there" means a death of the same kind with at most :data:`NEAR` tokens more or fewer than at
the first. An innocent request gets on between two deaths, so that they are not in the same place;
the one that workers die of does not. It is in the pass of each of them whatever else is, so two
deaths single it out with very few others, and it does not run unflagged from then on: the third
death strikes it under its own flag, and costs nobody else a suspicion.

To make suspects of the first death's requests would find the culprit no sooner and delay innocents
behind each other. It would also accuse the wrong ones: while those that were new in the pass run
under flags, a culprit that was old in it goes on unflagged beside them.

Several deaths that have no request in common are the machine's: see :func:`unrelated`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import combinations

NEAR = 4
"""Tokens. Half of what a worker lets a suspect draw before the next one runs: that one may take the
former's last tokens with it when it kills the worker, and must not seem to strike it."""
MARKED, SUSPECT, CONDEMNED = 1, 2, 3
UNRELATED = 3
RECENT = 32
"""Deaths that are looked at together."""

Point = tuple[int, ...]
"""How many tokens each choice of a request has."""


@dataclass(frozen=True, slots=True)
class Record:
    """The deaths of one ``kind`` that a request was there at, about where the first of them was:
    at ``point``."""

    kind: str = ""
    point: Point = ()
    deaths: int = 0

    def after(self, kind: str, at: Point, *, flagged: bool) -> Record:
        """One death more, of a worker in whose last forward pass the request was. It is condemned
        by one that struck it under a flag, and by no other."""
        if kind != self.kind or not near(self.point, at):
            return Record(kind, at, MARKED)
        most = CONDEMNED if flagged else SUSPECT
        return Record(kind, self.point, max(self.deaths, min(self.deaths + 1, most)))

    def suspect(self, at: Point) -> bool:
        """Whether it has to go on under a flag."""
        return self.deaths >= SUSPECT and near(self.point, at)

    @property
    def condemned(self) -> bool:
        return self.deaths >= CONDEMNED


def near(one: Point, other: Point) -> bool:
    return len(one) == len(other) and all(
        abs(a - b) <= NEAR for a, b in zip(one, other, strict=True)
    )


def unrelated(passes: Sequence[Collection[str]]) -> bool:
    """Whether among the last deaths, each given by the requests of its last pass, there are
    :data:`UNRELATED` without a request in common: no single one can have caused them. Deaths that
    no request was there at say nothing."""
    kept = list(dict.fromkeys(frozenset(each) for each in passes if each))[-RECENT:]
    return any(
        all(one.isdisjoint(other) for one, other in combinations(some, 2))
        for some in combinations(kept, UNRELATED)
    )
