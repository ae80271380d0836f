"""The node as others see it: a view of every slot, and when there is something new to tell.

What a front end's choice depends on (a state, an incarnation, an endpoint) is told at once; what
only moves (load, progress, counts) at most every :data:`MOVEMENT_S`; and everything again every
``ROSTER_INTERVAL_S``, so that who came late or missed some is soon right.

Requests that workers die of, which every front end is to refuse for a while.

A reaper knows them by their fingerprints alone, repeats them in its rosters until their time is
over, and forgets them with itself: a front end that hears of a new reaper tells it again.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from mayfly_protocol import PROTOCOL_MINOR
from mayfly_protocol.counters import PUBLISHED
from mayfly_protocol.lifecycle import Beat, Loading
from mayfly_protocol.roster import (
    ROSTER_INTERVAL_S,
    Autopsy,
    Done,
    Loss,
    Quarantine,
    Quarantined,
    Release,
    Roster,
    SlotView,
)
from mayfly_reaper.crash_log import KEPT
from mayfly_reaper.rules.incarnation import STARTING, Incarnation
from mayfly_reaper.rules.slot import Slot

MAX_QUARANTINED = 256
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
        if len(self._kept) > MAX_QUARANTINED:
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


MOVEMENT_S = 0.25
LOSSES_KEPT_S = 60.0


def views(slot: Slot, model: str, now: float) -> tuple[SlotView, ...]:
    """A slot at one moment of the reaper's clock: the view of its worker, and while that is being
    replaced one of the successor or the predecessor beside it."""
    if slot.current is None:
        retry_in_s = max(0.0, slot.retry_at - now) if slot.state == "backoff" else None
        resting = SlotView(
            slot=slot.name,
            model=model,
            state=slot.idle_state,
            incarnation=slot.incarnation,
            retry_in_s=retry_in_s,
            detail=slot.detail,
        )
        return (resting, *(_view(slot, worker, model, now) for _, worker in slot.workers))
    return tuple(_view(slot, worker, model, now) for _, worker in slot.workers)


def _view(slot: Slot, worker: Incarnation, model: str, now: float) -> SlotView:
    ready, beat = worker.ready, worker.beat or Beat(phase="idle", progress=0)
    loading = worker.loading or Loading("starting")
    detail = slot.detail if worker.state != "ready" else ""
    if worker.state == "gone" and worker.verdict is not None:
        detail = worker.verdict.text
    return SlotView(
        slot=slot.name,
        model=model,
        state=worker.state,
        incarnation=worker.number,
        pid=worker.pid,
        endpoint=ready.endpoint if ready is not None else "",
        public_key=ready.public_key if ready is not None else "",
        card=ready.card if ready is not None else None,
        phase=loading.phase if worker.state in STARTING else beat.phase,
        load_done=loading.done,
        load_total=loading.total,
        progress=beat.progress,
        age_s=now - worker.spawned_at,
        detail=detail,
        trial=worker.trial,
        **{name: getattr(beat, name) for name in PUBLISHED},
    )


def news(view: SlotView) -> tuple[object, ...]:
    """The part of a view whose change is told at once."""
    return (
        view.state,
        view.incarnation,
        view.pid,
        view.endpoint,
        view.card,
        view.detail,
        view.trial,
    )


@dataclass(frozen=True, slots=True)
class _Lost:
    at: float
    loss: Loss


@dataclass(frozen=True, slots=True)
class _Recorded:
    at: float
    autopsy: Autopsy


class RosterPublisher:
    """Keeps the node's roster up to date and knows when the next one is due. ``refused`` gives what
    the node refused peers so far, by reason."""

    def __init__(
        self,
        node: str,
        epoch: str,
        pid: int,
        now: float,
        refused: Callable[[], dict[str, int]] = dict,
    ) -> None:
        self._node = node
        self._epoch = epoch
        self._pid = pid
        self._refused_peers = refused
        self._revision = 0
        self._told_at = now
        self._due = now
        self._views: dict[str, tuple[SlotView, ...]] = {}
        self._lost: list[_Lost] = []
        self._recorded: deque[_Recorded] = deque(maxlen=KEPT)
        self._refused = QuarantineList()

    @property
    def due(self) -> float:
        return self._due

    def ask(self, now: float) -> None:
        """Somebody wants to know now."""
        self._due = now

    def lose(self, loss: Loss, now: float) -> None:
        self._lost.append(_Lost(now, loss))
        self._change(now)

    def record(self, autopsy: Autopsy, now: float) -> None:
        """Takes in what was written of a lost worker, as old as it says."""
        self._recorded.append(_Recorded(now - autopsy.age_s, autopsy))
        self._change(now)

    def refuse(self, asked: Quarantine | Release, now: float) -> Done:
        """Has every front end refuse a request, or no longer."""
        self._change(now)
        match asked:
            case Quarantine():
                return self._refused.add(asked, now)
            case Release():
                return self._refused.release(asked, now)

    def show(self, name: str, views: tuple[SlotView, ...], now: float) -> None:
        """Takes in how a slot is now."""
        last = self._views.get(name, ())
        self._views[name] = views
        if list(map(news, last)) != list(map(news, views)):
            self._change(now)
        elif any(_moved(*pair) for pair in zip(last, views, strict=True)):
            self._revision += 1
            self._due = min(self._due, max(now, self._told_at + MOVEMENT_S))

    def tell(self, now: float) -> Roster:
        """The roster to publish. The next one is due an interval later."""
        self._told_at = now
        self._due = now + ROSTER_INTERVAL_S
        return self.roster(now)

    def roster(self, now: float) -> Roster:
        """The node as it is, with times as they are now."""
        self._lost = [lost for lost in self._lost if now - lost.at <= LOSSES_KEPT_S]
        return Roster(
            node=self._node,
            epoch=self._epoch,
            revision=self._revision,
            pid=self._pid,
            slots=tuple(itertools.chain.from_iterable(self._views.values())),
            losses=tuple(replace(lost.loss, age_s=now - lost.at) for lost in self._lost),
            quarantined=self._refused.entries(now),
            autopsies=tuple(replace(each.autopsy, age_s=now - each.at) for each in self._recorded),
            refused=self._refused_peers(),
            minor=PROTOCOL_MINOR,
        )

    def _change(self, now: float) -> None:
        self._revision += 1
        self._due = now


def _moved(last: SlotView, view: SlotView) -> bool:
    return replace(last, age_s=view.age_s, retry_in_s=view.retry_in_s) != view
