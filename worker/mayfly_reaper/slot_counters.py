"""What a slot has done since the reaper began, whichever of its workers did it.

A worker reports what it has counted since it started, and is gone one day. A slot's totals are what
its workers had reported when they went, and what those that live have reported by now::

    worker 1   0 .. 7 .. 12  killed
    worker 2                         0 .. 3 .. 9
    total      0    7    12         12   15   21        never falls

What a worker did after its last report dies with it: half a second's worth of one that is killed,
nothing of one that leaves in good order.

:func:`account` is a pure function of what the rules of the slot made of an event. It looks at the
slot before and after, so the rules need not know that anybody counts.
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
"""Lost; replaced because somebody asked for it, or because it had done enough, was old or large;
because it had survived faults; gone by itself in good order."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Of one worker's counts. Should a number fall all the same, then a new count has begun, and
    what was counted ``before`` stays."""

    now: WorkerCounters = field(default_factory=WorkerCounters)
    before: WorkerCounters = field(default_factory=WorkerCounters)

    def next(self, counts: WorkerCounters) -> Reading:
        if counts.fell_from(self.now):
            return Reading(counts, self.total)
        return Reading(counts, self.before)

    @property
    def total(self) -> WorkerCounters:
        return self.before.plus(self.now)


@dataclass(frozen=True, slots=True)
class Account:
    """``done`` is what workers that are gone have counted, ``living`` what the others have, by the
    number of their incarnation. ``starts`` counts all that were started and ``restarts``, by
    reason, those that ended other than by the end of the node; ``faults`` goes by kind and scope.
    ``lost_at`` is set while the slot recovers from a loss."""

    done: WorkerCounters = field(default_factory=WorkerCounters)
    living: Mapping[int, Reading] = field(default_factory=dict)
    starts: int = 0
    restarts: Mapping[str, int] = field(default_factory=dict)
    faults: Mapping[tuple[str, str], int] = field(default_factory=dict)
    loads: Distribution = NOTHING
    recoveries: Distribution = NOTHING
    messages: int = 0
    lost_at: float | None = None

    @property
    def total(self) -> WorkerCounters:
        total = self.done
        for reading in self.living.values():
            total = total.plus(reading.total)
        return total


def account(
    account: Account, before: Slot, event: Event, after: Slot, actions: Iterable[Action], now: float
) -> Account:
    """The account after a step of the rules, ``(before, event) -> (after, actions)``."""
    then, lives = _lives(before), _lives(after)
    if isinstance(event, MessageReceived):
        account = _heard(account, event, then)
    for number in lives.keys() - then.keys():
        living = {**account.living, number: Reading()}
        account = replace(account, living=living, starts=account.starts + 1)
    for number, worker in lives.items():
        if worker.ready_at is not None and (number not in then or then[number].ready_at is None):
            took_s = worker.ready_at - worker.spawned_at
            account = replace(account, loads=account.loads.observed(took_s, LOAD_BOUNDS_S))
    recorded = {action.worker.number for action in actions if isinstance(action, RecordLoss)}
    for number in then.keys() - lives.keys():
        reason = "lost" if number in recorded else _reason(before, then[number])
        account = _gone(account, number, reason if not after.stopping else None)
    for action in actions:
        if isinstance(action, AnnounceLoss):
            account = _lost(account, action, before, now)
    if account.lost_at is not None and after.state == "ready":
        took_s = now - account.lost_at
        recoveries = account.recoveries.observed(took_s, RECOVERY_BOUNDS_S)
        account = replace(account, recoveries=recoveries, lost_at=None)
    return account


def _heard(account: Account, said: MessageReceived, then: Mapping[int, Incarnation]) -> Account:
    account = replace(account, messages=account.messages + 1)
    number, message = said.incarnation, said.message
    if number not in then:
        return account
    if isinstance(message, Beat):
        reading = account.living.get(number, Reading()).next(message.totals())
        return replace(account, living={**account.living, number: reading})
    # Of a fault that its process does not outlive, the loss will tell.
    if isinstance(message, Fault) and message.scope in ("request", "batch", "recycle"):
        return _faulted(account, message.kind, message.scope)
    return account


def _gone(account: Account, number: int, reason: str | None) -> Account:
    living = dict(account.living)
    done = account.done.plus(living.pop(number, Reading()).total)
    restarts = _with_one_more(account.restarts, reason) if reason else account.restarts
    return replace(account, done=done, living=living, restarts=restarts)


def _lost(account: Account, lose: AnnounceLoss, before: Slot, now: float) -> Account:
    account = _faulted(account, lose.verdict.kind, lose.verdict.scope)
    was_life = before.current is not None and before.current.number == lose.worker.number
    if account.lost_at is None and was_life and not before.stopping:
        return replace(account, lost_at=now)
    return account


def _faulted(account: Account, kind: str, scope: str) -> Account:
    known = kind if kind in KINDS else "other"
    return replace(account, faults=_with_one_more(account.faults, (known, scope)))


def _reason(before: Slot, worker: Incarnation) -> str:
    """Why a worker went that nothing was wrong with."""
    if before.recycling:
        return before.recycle_cause
    survived = any(each.fault.scope in ("batch", "recycle") for each in worker.survived)
    return "faults" if survived else "left"


def _lives(slot: Slot) -> dict[int, Incarnation]:
    return {worker.number: worker for _, worker in slot.workers}


def _with_one_more(counts: Mapping[K, int], key: K) -> Mapping[K, int]:
    return {**counts, key: counts.get(key, 0) + 1}
