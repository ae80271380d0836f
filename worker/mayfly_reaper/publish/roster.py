"""Roster of a node (its state, as the reaper publishes it to front ends): a view of every slot,
recent losses of workers, and the quarantine.

A change on which a front end's choice of a worker depends (a state, a worker process, an endpoint)
is published at once; changes of mere numbers (load, progress, counts) at most every
:data:`MOVEMENT_S` seconds; and the whole roster every ``ROSTER_INTERVAL_S`` seconds, so that a
front end that came late or missed a roster is soon up to date.

Quarantined requests are requests that make workers die; every front end is to refuse them for a
while. The reaper knows only their fingerprints (hashes) and forgets them when it ends: a front end
that sees a new reaper sends them again.
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
from mayfly_reaper.crash_log import RECENT_AUTOPSIES
from mayfly_reaper.rules.incarnation import STARTING, Incarnation
from mayfly_reaper.rules.slot import Slot

MOVEMENT_S = 0.25
LOSSES_KEPT_S = 60.0
MAX_QUARANTINED = 256
"""Largest number of quarantined requests (refused by all front ends, since workers die of them). If
there are more, requests whose quarantine would end first are forgotten."""


# -- the quarantine --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _QuarantineEntry:
    kind: str
    until: float


class QuarantineList:
    """Fingerprints (hashes) of requests that front ends are to refuse because workers die of them.
    Times are by the caller's monotonic clock."""

    def __init__(self) -> None:
        self._entries: dict[str, _QuarantineEntry] = {}

    def add(self, request: Quarantine, now: float) -> Done:
        """Adds a request's fingerprint, for ``request.ttl_s`` seconds from ``now`` on. If the list
        has the fingerprint already, the later of the two ends counts."""
        until = now + request.ttl_s
        known = self._entries.get(request.fingerprint)
        if known is None or known.until < until:
            self._entries[request.fingerprint] = _QuarantineEntry(request.kind, until)
        if len(self._entries) > MAX_QUARANTINED:
            self._entries.pop(min(self._entries, key=lambda each: self._entries[each].until))
        return Done(True, f"refusing {request.fingerprint} for {request.ttl_s:g} s")

    def release(self, request: Release, now: float) -> Done:
        """Ends the quarantine of all requests whose fingerprints begin with ``request.fingerprint``
        (if it is empty, of all requests). The answer is a failure if the text is not empty and no
        fingerprint begins with it."""
        found = [each.fingerprint for each in self.entries(now)]
        found = [each for each in found if each.startswith(request.fingerprint)]
        if request.fingerprint and not found:
            return Done(False, f"nothing in quarantine begins with {request.fingerprint!r}")
        for fingerprint in found:
            del self._entries[fingerprint]
        return Done(True, f"released {len(found)}")

    def entries(self, now: float) -> tuple[Quarantined, ...]:
        """Returns the requests that front ends are to refuse now, each with the seconds left."""
        self._entries = {name: each for name, each in self._entries.items() if each.until > now}
        return tuple(
            Quarantined(name, each.kind, each.until - now) for name, each in self._entries.items()
        )


# -- views of slots --------------------------------------------------------------------------


def slot_views(slot: Slot, model: str, now: float) -> tuple[SlotView, ...]:
    """Returns the published views of a slot (a place for one worker) at the time ``now`` of the
    reaper's clock: of its current worker or the empty slot, and of a second worker during a
    replacement."""
    views = tuple(_worker_view(slot, worker, model, now) for _, worker in slot.workers)
    if slot.current is not None:
        return views
    empty = SlotView(
        slot=slot.name,
        model=model,
        state=slot.idle_state,
        incarnation=slot.incarnation,
        retry_in_s=max(0.0, slot.retry_at - now) if slot.state == "backoff" else None,
        detail=slot.detail,
    )
    return (empty, *views)


def _worker_view(slot: Slot, worker: Incarnation, model: str, now: float) -> SlotView:
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


def urgent_fields(view: SlotView) -> tuple[object, ...]:
    """Returns the fields of a slot's view whose changes are published to front ends at once."""
    return (
        view.state,
        view.incarnation,
        view.pid,
        view.endpoint,
        view.card,
        view.detail,
        view.trial,
    )


def _moved(last: SlotView, view: SlotView) -> bool:
    return replace(last, age_s=view.age_s, retry_in_s=view.retry_in_s) != view


# -- the roster ------------------------------------------------------------------------------


class RosterPublisher:
    """Keeps the node's roster (its published state) up to date and knows when to publish it next.

    Args:
        refused: returns the numbers of connections and messages that the node's sockets have
            refused, by reason.
    """

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
        self._refused = refused
        self._revision = 0
        self._published_at = now
        self._due = now
        self._views: dict[str, tuple[SlotView, ...]] = {}
        self._losses: list[tuple[float, Loss]] = []
        """Lost workers, each with the time of the loss."""
        self._autopsies: deque[tuple[float, Autopsy]] = deque(maxlen=RECENT_AUTOPSIES)
        self._quarantine = QuarantineList()

    @property
    def due(self) -> float:
        return self._due

    def publish_soon(self, now: float) -> None:
        """Makes the next roster (the node's published state) due now, for a new subscriber."""
        self._due = now

    def add_loss(self, loss: Loss, now: float) -> None:
        self._losses.append((now, loss))
        self._change(now)

    def add_autopsy(self, autopsy: Autopsy, now: float) -> None:
        """Adds the crash record of a lost worker, to be published to front ends; ``age_s`` in the
        record is the record's age in seconds."""
        self._autopsies.append((now - autopsy.age_s, autopsy))
        self._change(now)

    def change_quarantine(self, request: Quarantine | Release, now: float) -> Done:
        """Adds a request to the list that every front end refuses, or removes requests from the
        list."""
        self._change(now)
        match request:
            case Quarantine():
                return self._quarantine.add(request, now)
            case Release():
                return self._quarantine.release(request, now)

    def update_slot(self, name: str, views: tuple[SlotView, ...], now: float) -> None:
        """Replaces the views (published states of the workers) of the slot ``name``. If they have
        changed, the next roster becomes due: at once if a field of :func:`urgent_fields` (such as
        the state) has changed; else at the earliest :data:`MOVEMENT_S` seconds after the last
        roster."""
        last = self._views.get(name, ())
        self._views[name] = views
        if list(map(urgent_fields, last)) != list(map(urgent_fields, views)):
            self._change(now)
        elif any(_moved(*pair) for pair in zip(last, views, strict=True)):
            self._revision += 1
            self._due = min(self._due, max(now, self._published_at + MOVEMENT_S))

    def next_roster(self, now: float) -> Roster:
        """Returns the roster to publish now, and makes the one after it due in
        ``ROSTER_INTERVAL_S`` seconds."""
        self._published_at = now
        self._due = now + ROSTER_INTERVAL_S
        return self.roster(now)

    def roster(self, now: float) -> Roster:
        """Returns the node's present state for front ends, with all ages as they are at the time
        ``now``."""
        self._losses = [(at, loss) for at, loss in self._losses if now - at <= LOSSES_KEPT_S]
        return Roster(
            node=self._node,
            epoch=self._epoch,
            revision=self._revision,
            pid=self._pid,
            slots=tuple(itertools.chain.from_iterable(self._views.values())),
            losses=tuple(replace(loss, age_s=now - at) for at, loss in self._losses),
            quarantined=self._quarantine.entries(now),
            autopsies=tuple(replace(autopsy, age_s=now - at) for at, autopsy in self._autopsies),
            refused=self._refused(),
            minor=PROTOCOL_MINOR,
        )

    def _change(self, now: float) -> None:
        self._revision += 1
        self._due = now
