"""Counters of a slot since the reaper's start, added up over the slot's workers.

A worker reports its counts since its own start. A slot's totals are the last reports of the workers
that have ended plus the latest reports of the workers that run::

    worker 1   0 .. 7 .. 12  killed
    worker 2                         0 .. 3 .. 9
    total      0    7    12         12   15   21        never falls

Work done after a worker's last report is not counted: half a second of it for a worker that is
killed, none for one that leaves in good order.

:func:`count_step` is a pure function of one step of the slot's rules. It compares the slot before
and after, so the rules hold no counters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from mayfly_protocol.common.histogram import NOTHING, Distribution
from mayfly_protocol.counters import WorkerCounters
from mayfly_protocol.faults import KINDS
from mayfly_protocol.lifecycle import Beat, Fault
from mayfly_reaper.rules.actions import Action, AnnounceLoss, RecordLoss
from mayfly_reaper.rules.events import Event, MessageReceived
from mayfly_reaper.rules.incarnation import Incarnation
from mayfly_reaper.rules.slot import Slot

K = TypeVar("K")

LOAD_BOUNDS_S = (0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
RECOVERY_BOUNDS_S = (0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)

RESTART_REASONS: Final = ("lost", "asked", "inferences", "age", "memory", "faults", "left")
"""Reasons for the end of a worker: lost; replaced by a command (``asked``) or at its limit of
inferences, age or memory; replaced after faults that it had survived; or left by itself in good
order."""


@dataclass(frozen=True, slots=True)
class WorkerTotals:
    """Totals of one worker's counters. If a counter falls although it should only grow, the worker
    has begun to count again from 0: ``earlier`` then holds the counts until the fall, and
    ``current`` the new counts."""

    current: WorkerCounters = field(default_factory=WorkerCounters)
    earlier: WorkerCounters = field(default_factory=WorkerCounters)

    def updated(self, counters: WorkerCounters) -> WorkerTotals:
        """Returns the totals after one more report of the worker's counters."""
        if counters.fell_from(self.current):
            return WorkerTotals(counters, self.total)
        return WorkerTotals(counters, self.earlier)

    @property
    def total(self) -> WorkerCounters:
        return self.earlier.plus(self.current)


@dataclass(frozen=True, slots=True)
class SlotCounters:
    """All counters of one slot since the reaper's start.

    ``ended`` is the sum over workers that have ended, ``running`` the totals of running workers by
    process number. ``starts`` counts workers started; ``restarts``, by reason, workers that ended
    while the node kept running; ``faults`` counts faults by kind and scope. ``lost_at`` is the time
    of a worker's loss while the slot recovers from it, otherwise None.
    """

    ended: WorkerCounters = field(default_factory=WorkerCounters)
    running: Mapping[int, WorkerTotals] = field(default_factory=dict)
    starts: int = 0
    restarts: Mapping[str, int] = field(default_factory=dict)
    faults: Mapping[tuple[str, str], int] = field(default_factory=dict)
    loads: Distribution = NOTHING
    recoveries: Distribution = NOTHING
    messages: int = 0
    lost_at: float | None = None

    @property
    def total(self) -> WorkerCounters:
        """The sum of the counters of all workers that the slot has had."""
        total = self.ended
        for worker in self.running.values():
            total = total.plus(worker.total)
        return total


def count_step(
    counted: SlotCounters,
    before: Slot,
    event: Event,
    after: Slot,
    actions: Iterable[Action],
    now: float,
) -> SlotCounters:
    """Returns a slot's counters after one step of the slot's rules, in which ``event`` turned the
    slot ``before`` into ``after`` and asked for ``actions``."""
    old, new = _workers(before), _workers(after)
    if isinstance(event, MessageReceived):
        counted = _with_message(counted, event, old)
    for number in new.keys() - old.keys():
        running = {**counted.running, number: WorkerTotals()}
        counted = replace(counted, running=running, starts=counted.starts + 1)
    for number, worker in new.items():
        if worker.ready_at is not None and (number not in old or old[number].ready_at is None):
            took_s = worker.ready_at - worker.spawned_at
            counted = replace(counted, loads=counted.loads.observed(took_s, LOAD_BOUNDS_S))
    recorded = {action.worker.number for action in actions if isinstance(action, RecordLoss)}
    for number in old.keys() - new.keys():
        reason = "lost" if number in recorded else _restart_reason(before, old[number])
        counted = _with_end(counted, number, reason if not after.stopping else None)
    for action in actions:
        if isinstance(action, AnnounceLoss):
            counted = _with_loss(counted, action, before, now)
    if counted.lost_at is not None and after.state == "ready":
        took_s = now - counted.lost_at
        recoveries = counted.recoveries.observed(took_s, RECOVERY_BOUNDS_S)
        counted = replace(counted, recoveries=recoveries, lost_at=None)
    return counted


def _with_message(
    counted: SlotCounters, received: MessageReceived, workers: Mapping[int, Incarnation]
) -> SlotCounters:
    counted = replace(counted, messages=counted.messages + 1)
    number, message = received.incarnation, received.message
    if number not in workers:
        return counted
    if isinstance(message, Beat):
        totals = counted.running.get(number, WorkerTotals()).updated(message.totals())
        return replace(counted, running={**counted.running, number: totals})
    # A fault that ends its process is counted with the loss.
    if isinstance(message, Fault) and message.scope in ("request", "batch", "recycle"):
        return _with_fault(counted, message.kind, message.scope)
    return counted


def _with_end(counted: SlotCounters, number: int, reason: str | None) -> SlotCounters:
    running = dict(counted.running)
    ended = counted.ended.plus(running.pop(number, WorkerTotals()).total)
    restarts = _with_one_more(counted.restarts, reason) if reason else counted.restarts
    return replace(counted, ended=ended, running=running, restarts=restarts)


def _with_loss(counted: SlotCounters, loss: AnnounceLoss, before: Slot, now: float) -> SlotCounters:
    counted = _with_fault(counted, loss.verdict.kind, loss.verdict.scope)
    was_current = before.current is not None and before.current.number == loss.worker.number
    if counted.lost_at is None and was_current and not before.stopping:
        return replace(counted, lost_at=now)
    return counted


def _with_fault(counted: SlotCounters, kind: str, scope: str) -> SlotCounters:
    known = kind if kind in KINDS else "other"
    return replace(counted, faults=_with_one_more(counted.faults, (known, scope)))


def _restart_reason(before: Slot, worker: Incarnation) -> str:
    """Returns the reason for which a worker ended that was not lost, such as its age."""
    if before.recycling:
        return before.recycle_cause
    survived = any(each.fault.scope in ("batch", "recycle") for each in worker.survived)
    return "faults" if survived else "left"


def _workers(slot: Slot) -> dict[int, Incarnation]:
    return {worker.number: worker for _, worker in slot.workers}


def _with_one_more(counts: Mapping[K, int], key: K) -> Mapping[K, int]:
    return {**counts, key: counts.get(key, 0) + 1}
