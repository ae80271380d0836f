"""Quarantine: finds the requests that make workers die, and refuses those requests for a while.

When a worker dies, the requests of its last forward pass are known. Some of these requests may be
culprits, or none, because a GPU can also fail by itself. The number of worker deaths that a request
was involved in decides::

    1st death                        marked    the request continues at once on another worker
    2nd, near the place of the 1st   suspect   the request continues as a suspect: a worker runs
                                               only one suspect at a time, and each forward pass
                                               with it contains no other request
    3rd, there, while a suspect      culprit   the request fails and is quarantined: every front
                                               end refuses it for a while
    over NEAR tokens further on                the deaths no longer count

Two deaths are near each other if the request had generated at most :data:`NEAR` tokens more or
fewer at one than at the other, whatever their kinds: with several culprits in a pass, each brings
about a kind of its own. An innocent request generates tokens between two deaths, so its deaths are
in different places; a culprit does not. A suspect is alone in its forward passes, so the third
death is a proof, however many culprits there are: k culprits cost at most 3 k deaths, and an
innocent request is in at most two failing passes near one place.

A fault that breaks the batch of a worker that stays counts like a death.

If the first death already made suspects, the culprit would be found no sooner, and innocent
requests would wait for each other.

Several deaths that have no request in common are blamed on the machine, unless a worker that was
started since has generated tokens for other requests: see :func:`unrelated` and
:func:`served_others`.

A request in quarantine is known by a hash of everything that decides its computation. Its text
never leaves this process::

    culprit found here --> refused here at once
         |
         +--> sent to every reaper --> every reaper repeats it to all front ends in its rosters,
                                       until the quarantine's time is over or an operator ends it
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from mayfly_protocol.codec import encode
from mayfly_protocol.requests import Generation
from mayfly_protocol.roster import Loss, Quarantine, Quarantined, Roster

NEAR = 4
"""Largest number of tokens by which a request's progress may differ between two deaths of workers
that count as deaths in the same place. It is half the number of tokens that a worker lets a suspect
(a request that may have killed workers) generate before it starts the next suspect: if the next
suspect kills the worker, the first one may lose its latest tokens, but still counts as being in a
new place."""
MARKED, SUSPECT, CULPRIT = 1, 2, 3
"""Number of worker deaths in one place of a request's generation after which the request is only
marked, is a suspect, or is the culprit."""
UNRELATED = 3
"""Number of worker deaths without a common request that are blamed on the machine."""
RECENT = 32
"""Number of the latest worker deaths that are compared with each other."""
_UNCONFIRMED_S = 10.0
"""Seconds for which this front end refuses a request that it quarantined while no node has
confirmed the quarantine."""

Point = tuple[int, ...]
"""A place in a request's generation: the number of tokens generated so far for each choice."""


@dataclass(frozen=True, slots=True)
class Record:
    """The deaths of workers that had a request in their last forward pass: ``deaths`` in a row,
    each near the one before. ``point`` is the request's progress at the last of them, ``kind`` its
    kind of fault."""

    kind: str = ""
    point: Point = ()
    deaths: int = 0

    def after(self, kind: str, at: Point, *, flagged: bool) -> Record:
        """Returns the record with one more death of a worker that had the request in its last
        forward pass. The request becomes the culprit only if it was ``flagged`` as a suspect, so
        that it was alone in that pass."""
        if not self.deaths or not near(self.point, at):
            return Record(kind, at, MARKED)
        most = CULPRIT if flagged else SUSPECT
        return Record(kind, at, max(self.deaths, min(self.deaths + 1, most)))

    def suspect(self, at: Point) -> bool:
        """True if the request, which has got to the place ``at``, may be what workers die of, so
        that a worker must run it alone."""
        return self.deaths >= SUSPECT and near(self.point, at)

    @property
    def culprit(self) -> bool:
        """True if the request with this record is to blame for the deaths of workers."""
        return self.deaths >= CULPRIT


def near(one: Point, other: Point) -> bool:
    """True if two places in a request's generation differ by at most :data:`NEAR` tokens in each
    choice."""
    return len(one) == len(other) and all(
        abs(a - b) <= NEAR for a, b in zip(one, other, strict=True)
    )


def unrelated(passes: Sequence[Collection[str]]) -> bool:
    """True if among the last worker deaths there are :data:`UNRELATED` of which no two have a
    request in common, so that no single request can have caused them. ``passes`` holds the ids of
    the requests in the last forward pass of each dead worker; empty passes are ignored."""
    kept = list(dict.fromkeys(frozenset(each) for each in passes if each))[-RECENT:]
    return any(
        all(one.isdisjoint(other) for one, other in combinations(some, 2))
        for some in combinations(kept, UNRELATED)
    )


def served_others(served: Collection[str], loss: Loss | None) -> bool:
    """True if a worker has generated tokens for a request that did not cause its ``loss`` (None: it
    lives), so that the machine works. ``served`` holds the ids of the requests for which the worker
    had generated tokens. Of those that were in no failed prefill, one may be a culprit."""
    suspects, marked = (loss.suspects, loss.marked) if loss is not None else ((), served)
    return bool(set(served) - {*suspects, *marked}) or len(set(served) - {*suspects}) > 1


def fingerprint(generation: Generation, digest: str, tenant: str) -> str:
    """A hash of what a request makes a model compute: the model's digest, the prompt and every
    parameter but the seed. ``tenant`` is the name of the client's API key: equal requests of two
    keys have different fingerprints, so that no client can have the requests of another one
    refused, or learn from a refusal what another one asks."""
    asked = replace(
        generation,
        model=digest,
        sampling=replace(generation.sampling, seed=0),
        output=replace(generation.output, early_calls=False),
    )
    content = tenant.encode() + b"\0" + encode(asked)
    return hashlib.blake2b(content, digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class _Own:
    """A request that this front end quarantined itself. It is kept until the time ``until``, or
    until a node lists it as quarantined."""

    kind: str
    until: float


class QuarantineView:
    """The requests in quarantine, which a front end refuses: requests that it quarantined itself,
    and requests that the rosters (status messages) of the nodes' reapers list. Times are on the
    caller's monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._rosters: dict[str, tuple[Roster, float]] = {}
        self._own: dict[str, _Own] = {}

    def add(self, fingerprint: str, kind: str, now: float) -> None:
        """Refuses a request from now on. The caller tells the nodes, so that other front ends
        refuse it, too."""
        self._own[fingerprint] = _Own(kind, now + _UNCONFIRMED_S)

    def update(self, address: str, roster: Roster, now: float) -> list[Quarantine]:
        """Takes a node's newest roster (status message of its reaper process). If the reaper has
        restarted, returns the messages that tell the new reaper which requests the old one had in
        quarantine."""
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
        """Drops the quarantined requests that a node listed, because the node is no longer used."""
        self._rosters.pop(address, None)

    def kind(self, fingerprint: str, now: float) -> str | None:
        """The kind of fault by which a request made workers fail; None if it is not in
        quarantine."""
        own = self._own.get(fingerprint)
        if own is not None and own.until > now:
            return own.kind
        found = (e for e in self.entries(now) if e.fingerprint == fingerprint)
        return next((entry.kind for entry in found), None)

    @property
    def empty(self) -> bool:
        """True if no request is in quarantine, that is, refused because workers died of it."""
        return not self._own and not any(roster.quarantined for roster, _ in self._rosters.values())

    def entries(self, now: float) -> list[Quarantined]:
        """All requests that nodes list as quarantined, each with the longest remaining time that
        any node gives."""
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
