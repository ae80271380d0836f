"""Rules of one slot: spawning, back-off, planned recycles, and what follows the loss of a worker.

::

              allowed           current (mayfly_reaper.rules.worker)
    BACKOFF --------> SPAWNING, LOADING, CANARY, READY, DRAINING, GONE
       ^  ^                                                        | finished
       |  +---- after a delay, or none ----------------------------+
       |  recycle                                                  |
       +------------------ FAILED <-- configuration that cannot ---+
                                      work                         |
                           GONE   <-- the node stops --------------+

A slot has one worker, ``current``. While a planned recycle replaces it there may be two (a
*surge*)::

    current      READY ..................... DRAINING ... finished  becomes the predecessor
    successor    SPAWNING ... LOADING ... CANARY ... READY          becomes current

A slot in BACKOFF whose time has come wants a worker, which :mod:`mayfly_reaper.machine.spawn_gate`
allows or defers by the machine's memory and faults.

If the successor is lost, the current worker serves on. If the current worker is lost, the successor
takes its place, loaded or not. So a slot never has two READY workers, nor three workers.

The rules are a pure function, ``(slot, event, now) -> (slot, actions)``. A monotonic clock (as
``now``), a random draw, and a counter that never gives a worker's number twice in a node are
injected. Messages of a worker that is finished change nothing and are counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from mayfly_protocol.roster import SlotState
from mayfly_reaper.rules.actions import Action, RecordLoss, Spawn, WipeKernels
from mayfly_reaper.rules.backoff import backoff_s
from mayfly_reaper.rules.events import (
    DeferCause,
    Event,
    MessageReceived,
    ProcessEnded,
    ProcessExited,
    ProcessStarted,
    RecycleCause,
    RecycleRequested,
    SpawnAllowed,
    SpawnDeferred,
    SpawnFailed,
    StopRequested,
    Tick,
    WorkerEvent,
)
from mayfly_reaper.rules.exit_cause import (
    GPU_IS_BUSY,
    NOT_HELD_AGAINST_SLOT,
    OUT_OF_MEMORY,
    Verdict,
)
from mayfly_reaper.rules.incarnation import Incarnation
from mayfly_reaper.rules.mitigations import NO_MITIGATIONS, Mitigations
from mayfly_reaper.rules.worker import WorkerRules
from mayfly_reaper.settings import Budgets

PAUSE_S = 3.0
"""A slot gets an event every second. More seconds than this without an event mean that the machine
slept or the reaper was stopped, so that no worker counts as late for this time."""

WorkerRole = Literal["current", "successor", "predecessor"]
ROLES: tuple[WorkerRole, ...] = ("current", "successor", "predecessor")


REQUEST_LOSSES = 24
"""Losses in a row, each in a forward pass of requests, after which the pauses before a slot's next
workers begin to grow: what eight requests cost that each end three workers."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A place of a node for one worker process. Times are by the reaper's monotonic clock, in
    seconds."""

    name: str
    seen_at: float
    """The time of the slot's last event."""
    idle_state: SlotState = "backoff"
    """The state of the slot while it has no current worker."""
    current: Incarnation | None = None
    successor: Incarnation | None = None
    predecessor: Incarnation | None = None
    incarnation: int = 0
    """The number of the current worker process, or of the last one if there is none."""
    spawned_at: float = float("-inf")
    losses_in_a_row: int = 0
    """Number of losses of workers in a row, which lengthen the pause before the next worker."""
    last_loss_kind: str = ""
    mitigations: Mitigations = NO_MITIGATIONS
    kernels_wiped: bool = False
    """True if the slot's cached compiled kernels were removed once, as a cure for faults."""
    retry_at: float = 0.0
    """The time at which a slot in back-off (the pause after a loss) wants a worker."""
    detail: str = ""
    stopping: bool = False
    recycling: bool = False
    """True while a planned replacement of the slot's worker is under way."""
    recycle_cause: RecycleCause = "asked"
    """The cause of the last planned replacement of the slot's worker."""
    recycle_not_before: float = 0.0
    """The time before which no planned replacement of the slot's worker begins."""
    failed_recycles: int = 0
    """Number of planned replacements of the slot's worker that failed in a row."""
    no_room_for_surge: bool = False
    """True if a worker loaded as a replacement beside the current worker ran out of memory."""
    memory_needed: int = 0
    """Bytes of memory that the slot's next worker is expected to need: those that the last
    ready worker took when it had just become READY; 0 until such a worker has ended."""
    memory_freed_at: float = 0.0
    """The time of the last worker's exit, from which on its memory should become free."""
    late_messages: int = 0
    """Number of messages from worker processes that had already ended."""
    defer_cause: DeferCause | None = None
    """The cause that keeps the slot from getting the worker that it wants, if any."""

    @property
    def state(self) -> SlotState:
        return self.current.state if self.current is not None else self.idle_state

    @property
    def workers(self) -> list[tuple[WorkerRole, Incarnation]]:
        """The slot's workers that have a process or may have one, each with its role: current
        worker, successor or predecessor."""
        found = (self.current, self.successor, self.predecessor)
        return [
            (role, worker) for role, worker in zip(ROLES, found, strict=True) if worker is not None
        ]

    def with_worker(self, role: WorkerRole, worker: Incarnation | None) -> Slot:
        """Returns the slot with ``worker`` as its current worker, successor or predecessor; with
        None, the slot has no worker in this role."""
        match role:
            case "current":
                number = worker.number if worker is not None else self.incarnation
                return replace(self, current=worker, incarnation=number)
            case "successor":
                return replace(self, successor=worker)
            case "predecessor":
                return replace(self, predecessor=worker)


SlotStep = tuple[Slot, list[Action]]


class SlotRules:
    """Rules of a slot as a pure function ``(slot, event, now) -> (slot, actions)``.

    Args:
        draw: returns a random number, uniform in [0, 1), for the jitter of pauses.
        number: returns the number of the next worker process, unique in the node and growing.
    """

    def __init__(
        self, budgets: Budgets, draw: Callable[[], float], number: Callable[[], int]
    ) -> None:
        self._budgets = budgets
        self._draw = draw
        self._number = number
        self._worker_rules = WorkerRules(budgets)

    def begin(self, name: str, now: float) -> Slot:
        """Returns a new slot, which wants its first worker."""
        return Slot(name=name, seen_at=now, retry_at=now)

    def step(self, slot: Slot, event: Event, now: float) -> SlotStep:
        """Returns the slot after an event, and the actions that the reaper has to take, in
        order."""
        slot = _without_pause(slot, now)
        match event:
            case Tick():
                return self._tick(slot, now)
            case SpawnAllowed():
                wanted = self.wants_worker(slot, now)
                return self._spawn(slot, "current", now) if wanted else (slot, [])
            case SpawnDeferred(until, reason, cause):
                if self.wants_worker(slot, now):
                    slot = replace(slot, retry_at=until, detail=reason, defer_cause=cause)
                return slot, []
            case RecycleRequested():
                return self._recycle(slot, event, now)
            case StopRequested():
                return self._stop(slot, event, now)
            case (
                ProcessStarted(number)
                | SpawnFailed(number)
                | ProcessEnded(number)
                | ProcessExited(number)
                | MessageReceived(number)
            ):
                if all(worker.number != number for _, worker in slot.workers):
                    late = slot.late_messages + isinstance(event, MessageReceived)
                    return replace(slot, late_messages=late), []
                return self._worker_step(slot, number, event, now)

    def due(self, slot: Slot) -> float:
        """Returns the time at which a timeout of the slot's workers ends, or the slot will want a
        worker, whichever comes first; infinite if neither will. A ``Tick`` is due then."""
        times = [self._worker_rules.due(worker) for _, worker in slot.workers]
        if slot.state == "backoff":
            times.append(slot.retry_at)
        return min(times, default=float("inf"))

    def wants_worker(self, slot: Slot, now: float) -> bool:
        """Returns True if the slot is to get a worker now: it waits for the event ``SpawnAllowed``,
        which starts one, or ``SpawnDeferred``, which puts the start off."""
        return slot.state == "backoff" and now >= slot.retry_at

    # -- events ----------------------------------------------------------------------------

    def _tick(self, slot: Slot, now: float) -> SlotStep:
        actions: list[Action] = []
        due = [worker.number for _, worker in slot.workers if now >= self._worker_rules.due(worker)]
        for number in due:
            slot, more = self._worker_step(slot, number, Tick(), now)
            actions += more
        return slot, actions

    def _worker_step(
        self, slot: Slot, number: int, event: WorkerEvent | Tick, now: float
    ) -> SlotStep:
        role, worker = next(each for each in slot.workers if each[1].number == number)
        worker, actions = self._worker_rules.step(worker, event, now)
        slot = slot.with_worker(role, worker)
        if worker.finished:
            slot, more = self._finished(slot, role, worker, now)
        elif worker.state == "ready":
            slot, more = self._ready(slot, role, now)
        else:
            more = []
        return slot, [*actions, *more]

    def _recycle(self, slot: Slot, request: RecycleRequested, now: float) -> SlotStep:
        if slot.stopping:
            return slot, []
        worker = slot.current
        if worker is None:
            return self._spawn(slot, "current", now)
        if worker.state != "ready" or len(slot.workers) > 1:
            return slot, []  # the worker is leaving or new: there is nothing to replace
        slot = replace(slot, recycling=True, recycle_cause=request.cause, detail=request.reason)
        if request.surge:
            return self._spawn(slot, "successor", now)
        worker, actions = self._worker_rules.drain(worker, self._budgets.drain_s, now)
        return slot.with_worker("current", worker), actions

    def _stop(self, slot: Slot, request: StopRequested, now: float) -> SlotStep:
        slot = replace(slot, stopping=True)
        if slot.current is None:
            slot = replace(slot, idle_state="gone", detail="stopped")
        grace_s = request.grace_s if request.grace_s is not None else self._budgets.stop_s
        actions: list[Action] = []
        for role, worker in slot.workers:
            stopped, more = self._worker_rules.stop(worker, grace_s, request.hurry, now)
            slot = slot.with_worker(role, stopped)
            actions += more
        return slot, actions

    # -- what follows ----------------------------------------------------------------------

    def _spawn(self, slot: Slot, role: WorkerRole, now: float) -> SlotStep:
        worker = Incarnation(
            number=self._number(),
            spawned_at=now,
            last_message_at=now,
            last_progress_at=now,
            recycle_jitter=self._draw(),
            trial=slot.losses_in_a_row >= self._budgets.trial_losses,
        )
        slot = replace(slot.with_worker(role, worker), spawned_at=now, defer_cause=None)
        return slot, [Spawn(worker.number, slot.mitigations)]

    def _ready(self, slot: Slot, role: WorkerRole, now: float) -> SlotStep:
        """Handles a worker that has just become READY. If it replaces another worker, the
        replacement ends: the old worker finishes its requests and leaves."""
        if role == "predecessor":
            return slot, []
        if role == "current":
            if slot.successor is None and slot.predecessor is None:
                return replace(slot, recycling=False, detail=""), []
            return slot, []
        former, successor = slot.current, slot.successor
        if former is None:
            return slot, []  # the node stops
        actions: list[Action] = []
        if former.state == "ready":  # and not on its way out already
            former, actions = self._worker_rules.drain(former, self._budgets.drain_s, now)
        slot = replace(slot, successor=None, predecessor=former, failed_recycles=0)
        return slot.with_worker("current", successor), actions

    def _finished(self, slot: Slot, role: WorkerRole, worker: Incarnation, now: float) -> SlotStep:
        """Takes the worker, whose process is gone, out of the slot, and decides what the slot does
        next."""
        verdict = worker.verdict
        needed = worker.footprint_when_ready or slot.memory_needed
        slot = replace(slot.with_worker(role, None), memory_needed=needed)
        if slot.stopping:
            slot = replace(slot, idle_state="gone", detail="stopped")
            return slot, _record_loss(worker, "not replaced: the node stops")
        if role == "predecessor":
            slot = replace(slot, recycling=False)
            return slot, _record_loss(worker, "not replaced: its successor serves")
        if verdict is not None:
            slot = _with_mitigations(slot, worker, verdict)
        if role == "successor":
            return self._without_successor(slot, worker, now)
        recycling = slot.recycling and verdict is None
        slot = replace(slot, recycling=recycling, memory_freed_at=worker.exited_at)
        if slot.successor is not None:
            successor = slot.successor
            slot = replace(slot, successor=None, recycling=False).with_worker("current", successor)
            return slot, _record_loss(worker, "its successor, already on its way, takes its place")
        return self._respawn(slot, worker, verdict, now)

    def _without_successor(self, slot: Slot, worker: Incarnation, now: float) -> SlotStep:
        """Ends a replacement whose new worker was lost before it was READY: the current worker
        serves on."""
        budgets = self._budgets
        failures = slot.failed_recycles + 1
        wait = backoff_s(failures, budgets.retry_s, budgets.retry_max_s, self._draw())
        slot = replace(
            slot,
            recycling=False,
            failed_recycles=failures,
            recycle_not_before=now + wait,
            no_room_for_surge=worker.verdict is not None and worker.verdict.kind in OUT_OF_MEMORY,
            detail="",
        )
        done = f"the worker that it was to replace serves on; next try in {wait:.1f} s"
        return slot, _record_loss(worker, done)

    def _respawn(
        self, slot: Slot, worker: Incarnation, verdict: Verdict | None, now: float
    ) -> SlotStep:
        if verdict is not None and verdict.scope == "model":
            if verdict.kind != "cuda_compile" or slot.kernels_wiped:
                slot = replace(slot, idle_state="failed", detail=verdict.first.text)
                return slot, _record_loss(worker, "not tried again: this configuration cannot work")
            # A kill in the middle of writing a compiled kernel leaves a broken file. Where kernels
            # that were compiled anew are no better, no file was to blame.
            slot = self._with_retry(replace(slot, kernels_wiped=True), worker, verdict, now)
            done = f"its compiled kernels are removed; {_retry_text(slot, now)}"
            return slot, [*_record_loss(worker, done), WipeKernels()]
        slot = self._with_retry(slot, worker, verdict, now)
        return slot, _record_loss(worker, _retry_text(slot, now))

    def _with_retry(
        self, slot: Slot, worker: Incarnation, verdict: Verdict | None, now: float
    ) -> Slot:
        """Returns the slot after the loss of ``worker``, whose fault ``verdict`` names (None: it
        ended without a fault): in back-off, with the time at which its next worker is due and
        the number of losses in a row."""
        budgets = self._budgets
        steady = worker.served_s >= budgets.steady_s
        losses = 0 if steady else slot.losses_in_a_row
        served = worker.ready_at is not None
        not_held_against = verdict is None or verdict.kind in NOT_HELD_AGAINST_SLOT
        needs_pause = verdict is not None and (
            verdict.scope == "machine" or verdict.kind in GPU_IS_BUSY
        )
        if served and not_held_against:
            wait = 0.0
        elif served and losses == 0 and not needs_pause:
            wait = 0.0
            losses = 1
        else:
            losses += 1
            in_a_row = losses if needs_pause else _counted_losses(losses, worker)
            wait = backoff_s(in_a_row, budgets.retry_s, budgets.retry_max_s, self._draw())
        return replace(
            slot,
            idle_state="backoff",
            losses_in_a_row=losses,
            retry_at=max(now + wait, slot.spawned_at + budgets.spacing_s),
            detail=verdict.text if verdict is not None else "recycled",
            kernels_wiped=slot.kernels_wiped and not steady,
        )


def _counted_losses(losses: int, worker: Incarnation) -> int:
    """Returns the number of losses in a row by which the next pause is computed. Workers that were
    READY and died in forward passes of requests may have died of these: such requests are found by
    further deaths, and other requests wait meanwhile. So the pause does not grow for the first
    :data:`REQUEST_LOSSES` of them."""
    crumb = worker.exit.crumb if worker.exit is not None else None
    if worker.ready_at is None or crumb is None or not crumb.requests:
        return losses
    return max(min(losses, 2), losses - REQUEST_LOSSES)


def _with_mitigations(slot: Slot, worker: Incarnation, verdict: Verdict) -> Slot:
    # A worker that was still loading had less than its weights: its footprint is no measure for
    # those that follow.
    footprint = worker.peak_footprint if worker.ready is not None else 0
    mitigations = slot.mitigations.after(
        verdict.kind,
        slot.last_loss_kind,
        footprint=footprint,
        weight_bytes=worker.weight_bytes,
    )
    return replace(slot, mitigations=mitigations, last_loss_kind=verdict.kind)


def _without_pause(slot: Slot, now: float) -> Slot:
    gap = now - slot.seen_at
    slot = replace(slot, seen_at=now)
    if gap > PAUSE_S:
        for role, worker in slot.workers:
            slot = slot.with_worker(role, worker.shifted_by(gap))
    return slot


def _retry_text(slot: Slot, now: float) -> str:
    wait = slot.retry_at - now
    when = "a new worker starts " + (f"in {wait:.1f} s" if wait > 0 else "at once")
    return f"{when}, with {slot.mitigations}" if slot.mitigations != NO_MITIGATIONS else when


def _record_loss(worker: Incarnation, done: str) -> list[Action]:
    return [RecordLoss(worker, worker.verdict, done)] if worker.verdict is not None else []
