"""Quarantine: finds the request that workers die of, and refuses it for a while.

A worker that dies names the requests of the forward pass that it died in. One of them may be the
culprit, or none: a GPU fails by itself, too. The deaths that a request has seen decide::

    first death             marked      it goes on at once, like all the others
    again, about there      suspect     it goes on under a flag: a worker runs one such at a time
    again, under the flag   culprit     an error, and quarantine: nobody runs it for a while
    NEAR tokens further on  as if nothing had happened

"About there" means a death of the same kind with at most :data:`NEAR` tokens more or fewer than at
the first. An innocent request gets on between two deaths, so that they are not in the same place;
the one that workers die of does not. It is in the pass of each of them whatever else is, so two
deaths single it out with very few others, and it does not run unflagged from then on: the third
death meets it under its own flag, and costs nobody else a suspicion.

To make suspects of the first death's requests would find the culprit no sooner and delay innocents
behind each other. It would also accuse the wrong ones: while those that were new in the pass run
under flags, a culprit that was old in it goes on unflagged beside them.

Several deaths that have no request in common are the machine's: see :func:`unrelated`.

A request in quarantine is known by a hash of all that decides what it computes, and by nothing
else: no text of it leaves this process for that::

    culprit found here --> refused here at once
         |                                         the reapers' rosters tell every front end,
         +------> sent to every reaper ----------> this one too, until the time is over
                                                   or somebody releases it
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
"""Tokens. Half of what a worker lets a suspect generate before the next suspect runs: that one may
take the former's last tokens with it when it kills the worker, and the former must not seem to have
died in that place."""
MARKED, SUSPECT, CULPRIT = 1, 2, 3
"""The deaths in one place that make a request each of them."""
UNRELATED = 3
"""Deaths without a common request that are blamed on the machine."""
RECENT = 32
"""Deaths that are looked at together."""
_UNCONFIRMED_S = 10.0
"""Seconds for which a request is refused here without a roster that says so."""

Point = tuple[int, ...]
"""The number of tokens that each choice of a request has."""


@dataclass(frozen=True, slots=True)
class Record:
    """The deaths of one ``kind`` in a request's forward passes, all near ``point``, the place of
    the first one."""

    kind: str = ""
    point: Point = ()
    deaths: int = 0

    def after(self, kind: str, at: Point, *, flagged: bool) -> Record:
        """Adds the death of a worker in whose last forward pass the request was. Only a death that
        the request met under a flag makes it the culprit."""
        if kind != self.kind or not near(self.point, at):
            return Record(kind, at, MARKED)
        most = CULPRIT if flagged else SUSPECT
        return Record(kind, self.point, max(self.deaths, min(self.deaths + 1, most)))

    def suspect(self, at: Point) -> bool:
        """True if the request has to go on under a suspect's flag."""
        return self.deaths >= SUSPECT and near(self.point, at)

    @property
    def culprit(self) -> bool:
        """True if workers die of this request."""
        return self.deaths >= CULPRIT


def near(one: Point, other: Point) -> bool:
    """True if no choice differs by more than :data:`NEAR` tokens."""
    return len(one) == len(other) and all(
        abs(a - b) <= NEAR for a, b in zip(one, other, strict=True)
    )


def unrelated(passes: Sequence[Collection[str]]) -> bool:
    """Tells whether :data:`UNRELATED` of the last deaths, each given by the requests of its last
    pass, have no request in common: no single request can have caused them. Deaths without any
    request say nothing."""
    kept = list(dict.fromkeys(frozenset(each) for each in passes if each))[-RECENT:]
    return any(
        all(one.isdisjoint(other) for one, other in combinations(some, 2))
        for some in combinations(kept, UNRELATED)
    )


def fingerprint(generation: Generation, digest: str, tenant: str) -> str:
    """A hash of what a request makes a model compute: the model's digest, the prompt and every
    parameter but the seed. ``tenant`` keeps the requests of different API keys apart: nobody can
    have somebody else's requests refused, or learn from a refusal what others ask."""
    asked = replace(generation, model=digest, sampling=replace(generation.sampling, seed=0))
    content = tenant.encode() + b"\0" + encode(asked)
    return hashlib.blake2b(content, digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class _Own:
    """A request that this front end refuses by itself until a roster confirms it."""

    kind: str
    until: float


class QuarantineView:
    """The requests that a front end refuses. Times are on the caller's monotonic clock."""

    def __init__(self) -> None:
        self._rosters: dict[str, tuple[Roster, float]] = {}
        self._own: dict[str, _Own] = {}

    def add(self, fingerprint: str, kind: str, now: float) -> None:
        """Refuses a request here; the caller sends it to every reaper."""
        self._own[fingerprint] = _Own(kind, now + _UNCONFIRMED_S)

    def update(self, address: str, roster: Roster, now: float) -> list[Quarantine]:
        """Takes a node's roster. Returns the messages that a reaper which has started anew needs to
        know what its predecessor knew."""
        before = self._rosters.get(address)
        self._rosters[address] = (roster, now)
        confirmed = {entry.fingerprint for entry in roster.quarantined}
        self._own = {
            fingerprint: own
            for fingerprint, own in self._own.items()
            if fingerprint not in confirmed and own.until > now
        }
        if before is None or before[0].epoch == roster.epoch:
            return []
        return [
            Quarantine(entry.fingerprint, entry.kind, entry.left_s) for entry in _left(*before, now)
        ]

    def forget(self, address: str) -> None:
        """Drops what a node has said."""
        self._rosters.pop(address, None)

    def kind(self, fingerprint: str, now: float) -> str | None:
        """The kind of fault that workers died of with a request; None if it is not refused."""
        own = self._own.get(fingerprint)
        if own is not None and own.until > now:
            return own.kind
        found = (e for e in self.entries(now) if e.fingerprint == fingerprint)
        return next((entry.kind for entry in found), None)

    @property
    def empty(self) -> bool:
        """True if nothing is refused."""
        return not self._own and not any(roster.quarantined for roster, _ in self._rosters.values())

    def entries(self, now: float) -> list[Quarantined]:
        """All requests that the nodes refuse, each for the longest time that a node says."""
        longest: dict[str, Quarantined] = {}
        for roster, heard_at in self._rosters.values():
            for entry in _left(roster, heard_at, now):
                known = longest.get(entry.fingerprint)
                if known is None or known.left_s < entry.left_s:
                    longest[entry.fingerprint] = entry
        return list(longest.values())


def _left(roster: Roster, heard_at: float, now: float) -> list[Quarantined]:
    since = now - heard_at
    aged = (replace(entry, left_s=entry.left_s - since) for entry in roster.quarantined)
    return [entry for entry in aged if entry.left_s > 0]
