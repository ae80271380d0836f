"""Requests that are refused because workers died of them.

::

    condemned here --> refused here at once
         |                                       the reapers' rosters tell every front end,
         +------> every reaper is told --------> this one too, until the time is over
                                                 or somebody releases it

A request is known by a hash of all that decides what it computes, and by nothing else: no text of
it leaves this process for that.

Which request it is that workers die of.

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

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from mayfly_protocol.codec import encode
from mayfly_protocol.requests import Generation
from mayfly_protocol.roster import Quarantine, Quarantined, Roster

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


_UNCONFIRMED_S = 10.0
"""How long a request is refused here without a roster that says so."""


def fingerprint(generation: Generation, digest: str, tenant: str) -> str:
    """Of a request by what it makes a model compute, however often it is sent: the model's digest,
    the prompt and every parameter but the seed. ``tenant`` keeps those of different API keys apart:
    nobody can have somebody else's requests refused, or learn from a refusal what others ask."""
    asked = replace(generation, model=digest, sampling=replace(generation.sampling, seed=0))
    content = tenant.encode() + b"\0" + encode(asked)
    return hashlib.blake2b(content, digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class _Own:
    kind: str
    until: float


class QuarantineView:
    """What a front end knows to refuse. Times are on the caller's monotonic clock."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[Roster, float]] = {}
        self._own: dict[str, _Own] = {}

    def add(self, fingerprint: str, kind: str, now: float) -> None:
        """Condemned here; to be told to every reaper."""
        self._own[fingerprint] = _Own(kind, now + _UNCONFIRMED_S)

    def hear(self, address: str, roster: Roster, now: float) -> list[Quarantine]:
        """Takes a node's word; returns what a node whose reaper is a new one has to be told
        again."""
        before = self._told.get(address)
        self._told[address] = (roster, now)
        said = {entry.fingerprint for entry in roster.quarantined}
        self._own = {
            fingerprint: own
            for fingerprint, own in self._own.items()
            if fingerprint not in said and own.until > now
        }
        if before is None or before[0].epoch == roster.epoch:
            return []
        return [
            Quarantine(entry.fingerprint, entry.kind, entry.left_s) for entry in _left(*before, now)
        ]

    def forget(self, address: str) -> None:
        """Nothing that a node has said counts any more."""
        self._told.pop(address, None)

    def kind(self, fingerprint: str, now: float) -> str | None:
        """What workers died of when they ran this, if it is to be refused now."""
        own = self._own.get(fingerprint)
        if own is not None and own.until > now:
            return own.kind
        found = (e for e in self.entries(now) if e.fingerprint == fingerprint)
        return next((entry.kind for entry in found), None)

    @property
    def empty(self) -> bool:
        return not self._own and not any(roster.quarantined for roster, _ in self._told.values())

    def entries(self, now: float) -> list[Quarantined]:
        """What the nodes say, each as long as the longest of them says."""
        longest: dict[str, Quarantined] = {}
        for roster, heard_at in self._told.values():
            for entry in _left(roster, heard_at, now):
                known = longest.get(entry.fingerprint)
                if known is None or known.left_s < entry.left_s:
                    longest[entry.fingerprint] = entry
        return list(longest.values())


def _left(roster: Roster, heard_at: float, now: float) -> list[Quarantined]:
    since = now - heard_at
    aged = (replace(entry, left_s=entry.left_s - since) for entry in roster.quarantined)
    return [entry for entry in aged if entry.left_s > 0]
