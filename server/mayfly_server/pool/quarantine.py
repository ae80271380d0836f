"""Requests that are refused because workers died of them.

::

    condemned here --> refused here at once
         |                                       the reapers' rosters tell every front end,
         +------> every reaper is told --------> this one too, until the time is over
                                                 or somebody releases it

A request is known by a hash of all that decides what it computes, and by nothing else: no text of
it leaves this process for that.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from mayfly_protocol.codec import encode
from mayfly_protocol.requests import Generation
from mayfly_protocol.roster import Quarantine, Quarantined, Roster

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
