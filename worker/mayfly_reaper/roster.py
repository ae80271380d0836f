"""The node as others see it: a view of every slot, and when there is something new to tell.

What a front end's choice depends on (a state, an incarnation, an endpoint) is told at once; what
only moves (load, progress, counts) at most every :data:`MOVEMENT_S`; and everything again every
``ROSTER_INTERVAL_S``, so that who came late or missed some is soon right.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mayfly_protocol.lifecycle import Beat, Loading
from mayfly_protocol.roster import ROSTER_INTERVAL_S, Loss, Roster, SlotView
from mayfly_reaper.actions import Record
from mayfly_reaper.incarnation import STARTING
from mayfly_reaper.slot import Slot

MOVEMENT_S = 0.25
LOSSES_KEPT_S = 60.0


def view(slot: Slot, model: str, now: float) -> SlotView:
    """A slot at one moment of the reaper's clock."""
    life = slot.life
    if life is None:
        retry_in_s = max(0.0, slot.retry_at - now) if slot.state == "backoff" else None
        return SlotView(
            slot=slot.name,
            model=model,
            state=slot.state,
            incarnation=slot.incarnation,
            retry_in_s=retry_in_s,
            detail=slot.detail,
        )
    ready, beat = life.ready, life.beat or Beat(phase="idle", progress=0)
    loading = life.loading or Loading("starting")
    detail = slot.detail
    if slot.state == "gone" and life.verdict is not None:
        detail = life.verdict.text
    return SlotView(
        slot=slot.name,
        model=model,
        state=slot.state,
        incarnation=life.number,
        pid=life.pid,
        endpoint=ready.endpoint if ready is not None else "",
        public_key=ready.public_key if ready is not None else "",
        card=ready.card if ready is not None else None,
        phase=loading.phase if slot.state in STARTING else beat.phase,
        load_done=loading.done,
        load_total=loading.total,
        running=beat.running,
        waiting=beat.waiting,
        waiting_tokens=beat.waiting_tokens,
        inferences=beat.inferences,
        generated_tokens=beat.generated_tokens,
        progress=beat.progress,
        memory=beat.memory,
        age_s=now - life.spawned_at,
        detail=detail,
    )


def loss_of(slot: str, record: Record) -> Loss:
    """What a roster says of a worker that has just been lost."""
    fault = record.life.fault
    return Loss(
        slot=slot,
        incarnation=record.life.number,
        kind=record.verdict.kind,
        scope=record.verdict.scope,
        first_cause=record.verdict.first.text,
        age_s=0.0,
        suspects=fault.suspects if fault is not None else (),
    )


def news(view: SlotView) -> tuple[object, ...]:
    """The part of a view whose change is told at once."""
    return (view.state, view.incarnation, view.pid, view.endpoint, view.card, view.detail)


@dataclass(frozen=True, slots=True)
class _Lost:
    at: float
    loss: Loss


class Bulletin:
    """Keeps the node's roster up to date and knows when the next one is due."""

    def __init__(self, node: str, epoch: str, pid: int, now: float) -> None:
        self._node = node
        self._epoch = epoch
        self._pid = pid
        self._revision = 0
        self._told_at = now
        self._due = now
        self._views: dict[str, SlotView] = {}
        self._lost: list[_Lost] = []

    @property
    def due(self) -> float:
        return self._due

    def ask(self, now: float) -> None:
        """Somebody wants to know now."""
        self._due = now

    def lose(self, loss: Loss, now: float) -> None:
        self._lost.append(_Lost(now, loss))
        self._change(now)

    def show(self, view: SlotView, now: float) -> None:
        """Takes in how a slot is now."""
        last = self._views.get(view.slot)
        self._views[view.slot] = view
        if last is None or news(last) != news(view):
            self._change(now)
        elif _moved(last, view):
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
            slots=tuple(self._views.values()),
            losses=tuple(replace(lost.loss, age_s=now - lost.at) for lost in self._lost),
        )

    def _change(self, now: float) -> None:
        self._revision += 1
        self._due = now


def _moved(last: SlotView, view: SlotView) -> bool:
    return replace(last, age_s=view.age_s, retry_in_s=view.retry_in_s) != view
