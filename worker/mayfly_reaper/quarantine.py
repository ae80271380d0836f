"""Requests that workers die of, which every front end is to refuse for a while.

A reaper knows them by their fingerprints alone, repeats them in its rosters until their time is
over, and forgets them with itself: a front end that hears of a new reaper tells it again.
"""

from __future__ import annotations

from dataclasses import dataclass

from mayfly_protocol.roster import Done, Quarantine, Quarantined, Release

KEPT = 256
"""Each is in every roster. Beyond that the ones that would end first are forgotten."""


@dataclass(frozen=True, slots=True)
class _Kept:
    kind: str
    until: float


class QuarantineList:
    """Times are of the caller's monotonic clock."""

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}

    def add(self, asked: Quarantine, now: float) -> Done:
        """Told of the same one twice, the later end counts."""
        until = now + asked.ttl_s
        known = self._kept.get(asked.fingerprint)
        if known is None or known.until < until:
            self._kept[asked.fingerprint] = _Kept(asked.kind, until)
        if len(self._kept) > KEPT:
            self._kept.pop(min(self._kept, key=lambda each: self._kept[each].until))
        return Done(True, f"refusing {asked.fingerprint} for {asked.ttl_s:g} s")

    def release(self, asked: Release, now: float) -> Done:
        found = [each.fingerprint for each in self.entries(now)]
        found = [each for each in found if each.startswith(asked.fingerprint)]
        if asked.fingerprint and not found:
            return Done(False, f"nothing in quarantine begins with {asked.fingerprint!r}")
        for fingerprint in found:
            del self._kept[fingerprint]
        return Done(True, f"released {len(found)}")

    def entries(self, now: float) -> tuple[Quarantined, ...]:
        """What is to be refused now."""
        self._kept = {name: kept for name, kept in self._kept.items() if kept.until > now}
        return tuple(
            Quarantined(name, kept.kind, kept.until - now) for name, kept in self._kept.items()
        )
