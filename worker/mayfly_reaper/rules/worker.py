"""Rules of one worker: the meaning of its messages, its silence and its exit.

::

    SPAWNING --Hello--> LOADING --canary--> CANARY --Ready--> READY --stop, recycle--> DRAINING
        |                  |                  |                 |                         |
        +------------------+--------+---------+-----------------+-------------------------+
                                    |
              Fault, Bye, silent, no progress, exit; too late to leave
                                    v
                                  GONE --exited, and its last messages are in--> finished

A worker is GONE for front ends from the verdict on, while its process may still have to be killed:
front ends move its requests at the verdict, not at the exit. :mod:`mayfly_reaper.rules.slot`
decides what the slot does next. The time without a message or progress after which a worker counts
as hung is in :mod:`mayfly_reaper.rules.hang_detection`, the steps that end a process in
:mod:`mayfly_reaper.rules.kill_escalation`.
"""

from __future__ import annotations

from dataclasses import replace

from mayfly_protocol.lifecycle import (
    Beat,
    Bye,
    Cause,
    Drain,
    Exit,
    Fault,
    Hello,
    Loading,
    Ready,
    ToReaper,
)
from mayfly_protocol.roster import SlotState
from mayfly_reaper.rules import kill_escalation
from mayfly_reaper.rules.actions import Action, AnnounceLoss, SendMessage, SendSignal
from mayfly_reaper.rules.events import (
    MessageReceived,
    ProcessEnded,
    ProcessExited,
    ProcessStarted,
    SpawnFailed,
    Tick,
    WorkerEvent,
)
from mayfly_reaper.rules.exit_cause import Verdict, verdict_of_exit, verdict_of_fault
from mayfly_reaper.rules.hang_detection import hang_deadline, with_beat, with_loading
from mayfly_reaper.rules.incarnation import (
    STARTING,
    SURVIVED_FAULTS_KEPT,
    Incarnation,
    SurvivedFault,
)
from mayfly_reaper.rules.kill_escalation import Escalation
from mayfly_reaper.settings import Budgets

LAST_MESSAGES_S = 0.05
"""Seconds that the reaper waits after a worker's exit before it judges by the exit status: an exit
is noticed sooner than the messages that the worker sent before it."""

OVERSTAYED = Verdict(
    "wedged", "worker", Cause("Budget", "did not leave in the time that it was given")
)

WorkerStep = tuple[Incarnation, list[Action]]


class WorkerRules:
    """Rules of one worker as a pure function ``(worker, event, now) -> (worker, actions)``, with
    the time limits ``budgets``."""

    def __init__(self, budgets: Budgets) -> None:
        self._budgets = budgets

    def step(self, worker: Incarnation, event: WorkerEvent | Tick, now: float) -> WorkerStep:
        """Returns the worker after an event, and the actions that the reaper has to take."""
        match event:
            case Tick():
                return self._tick(worker, now)
            case ProcessStarted(_, pid):
                return replace(worker, pid=pid), []
            case SpawnFailed(_, reason):
                cause = Verdict("not_started", "machine", Cause("OSError", reason))
                return _finish(replace(worker, exited_at=now), cause)
            case ProcessEnded():
                return _gone(worker), []
            case ProcessExited():
                return self._exited(worker, event, now)
            case MessageReceived(_, message):
                return self._received(replace(worker, last_message_at=now), message, now)

    def drain(self, worker: Incarnation, grace_s: float, now: float) -> WorkerStep:
        """Lets the worker finish its requests within ``grace_s`` seconds and then makes the worker
        leave."""
        worker = replace(worker, state="draining", leave_requested=True, grace_s=grace_s)
        return self._escalate(replace(worker, escalation=kill_escalation.ORDERLY), now)

    def stop(self, worker: Incarnation, grace_s: float, hurry: bool, now: float) -> WorkerStep:
        """Makes the worker leave because the node stops, whatever the worker is doing; with
        ``hurry``, at once."""
        if worker.exit is not None:
            return worker, []
        if hurry:
            return self._force(worker, kill_escalation.AT_ONCE, now)
        if worker.state == "gone":
            return worker, []
        if worker.state in STARTING:
            return self._force(worker, kill_escalation.WHILE_STARTING, now)
        return self.drain(worker, grace_s, now)

    def due(self, worker: Incarnation) -> float:
        """Returns the time of the worker's next timeout, at which a ``Tick`` is due; infinite if
        there is none."""
        if worker.exit is not None:
            return worker.exited_at + LAST_MESSAGES_S
        times = [worker.escalate_at] if worker.escalation else []
        if worker.state != "gone":
            times.append(hang_deadline(worker, self._budgets).at)
        if worker.trial and worker.ready_at is not None:
            times.append(worker.ready_at + self._budgets.trial_s)
        return min(times, default=float("inf"))

    # -- time ------------------------------------------------------------------------------

    def _tick(self, worker: Incarnation, now: float) -> WorkerStep:
        worker = self._without_passed_trial(worker, now)
        if now < self.due(worker):
            return worker, []
        if worker.exit is not None:
            return _finish(worker, _final_verdict(worker, worker.exit))
        if worker.state != "gone":
            deadline = hang_deadline(worker, self._budgets)
            if now >= deadline.at:
                wedged = deadline.kind == "wedged"
                steps = kill_escalation.WEDGED if wedged else kill_escalation.AT_ONCE
                return self._give_up(worker, deadline.verdict(), steps, now)
        return self._escalate(worker, now)

    def _without_passed_trial(self, worker: Incarnation, now: float) -> Incarnation:
        if not worker.trial or worker.ready_at is None:
            return worker
        inferences = worker.beat.inferences if worker.beat is not None else 0
        served_long_enough = now >= worker.ready_at + self._budgets.trial_s
        if served_long_enough or inferences >= self._budgets.trial_inferences:
            return replace(worker, trial=False)
        return worker

    # -- messages --------------------------------------------------------------------------

    def _received(self, worker: Incarnation, message: ToReaper, now: float) -> WorkerStep:
        match message:
            case Fault(scope="request" | "batch" | "recycle"):
                return self._survived(worker, message, now)
            case Fault() | Bye():
                return self._leaves(worker, message, now)
            case Hello() if worker.state == "spawning":
                return replace(worker, state="loading", last_progress_at=now), []
            case Loading() if worker.state in STARTING:
                state: SlotState = "canary" if message.phase == "canary" else "loading"
                return with_loading(replace(worker, state=state), message, now), []
            case Ready() if worker.state in STARTING:
                worker = replace(worker, state="ready", ready=message, beat=None)
                return replace(worker, ready_at=now, last_progress_at=now), []
            case Beat():
                return self._without_passed_trial(with_beat(worker, message, now), now), []
            case _:  # a message at the wrong time shows that the worker lives, no more
                return worker, []

    def _survived(self, worker: Incarnation, fault: Fault, now: float) -> WorkerStep:
        """Notes a fault that the worker survives. After a fault that calls for a new worker, or
        several failed batches in a short time, lets the worker finish its requests and leave."""
        survived = (*worker.survived, SurvivedFault(now, fault))[-SURVIVED_FAULTS_KEPT:]
        worker = replace(worker, survived=survived)
        since = now - self._budgets.batch_window_s
        batches = [each for each in survived if each.at > since and each.fault.scope == "batch"]
        unfit = fault.scope == "recycle" or len(batches) >= self._budgets.batch_faults
        if unfit and worker.state == "ready":
            return self.drain(worker, self._budgets.drain_s, now)
        return worker, []

    def _leaves(self, worker: Incarnation, message: Fault | Bye, now: float) -> WorkerStep:
        """Handles a worker's message that it leaves or cannot go on: the worker is lost or leaving
        from now on, and is killed if its process does not end by itself in time."""
        if isinstance(message, Bye):
            worker = replace(worker, bye=message)
        else:
            verdict = worker.verdict or verdict_of_fault(message)
            worker = replace(worker, fault=worker.fault or message, verdict=verdict)
        if worker.exit is not None:
            return _finish(worker, _final_verdict(worker, worker.exit))
        if worker.state == "gone":
            return worker, []  # the first verdict stands, and its escalation
        leave_by = now + kill_escalation.leave_timeout(worker.weight_bytes, self._budgets)
        worker = replace(_gone(worker), escalation=kill_escalation.LEAVING, escalate_at=leave_by)
        return _announce_loss(worker)

    # -- the end ---------------------------------------------------------------------------

    def _exited(self, worker: Incarnation, event: ProcessExited, now: float) -> WorkerStep:
        worker = replace(_gone(worker), exit=event, exited_at=now, escalation=())
        if worker.fault is not None or worker.bye is not None:
            return _finish(worker, _final_verdict(worker, event))
        return worker, []

    def _give_up(
        self, worker: Incarnation, verdict: Verdict, escalation: Escalation, now: float
    ) -> WorkerStep:
        worker = replace(_gone(worker), verdict=verdict, escalation=escalation)
        worker, announced = _announce_loss(worker)
        worker, actions = self._escalate(worker, now)
        return worker, [*announced, *actions]

    def _force(self, worker: Incarnation, escalation: Escalation, now: float) -> WorkerStep:
        worker = replace(worker, leave_requested=True, forced=True, escalation=escalation)
        return self._escalate(_gone(worker), now)

    def _escalate(self, worker: Incarnation, now: float) -> WorkerStep:
        """Takes the next step of ending the worker's process: drain, SIGTERM, stacks or SIGKILL."""
        step, *rest = worker.escalation
        wait = kill_escalation.step_timeout(
            step, worker.grace_s, worker.weight_bytes, self._budgets
        )
        worker = replace(worker, escalation=tuple(rest), escalate_at=now + wait)
        if step == "drain":
            return worker, [SendMessage(worker.number, Drain(worker.grace_s))]
        announced: list[Action] = []
        if step == "kill" and not worker.forced:
            worker = replace(_gone(worker), verdict=worker.verdict or OVERSTAYED)
            worker, announced = _announce_loss(worker)
        kills = step in ("terminate", "kill")
        worker = replace(worker, kill_signal_sent=worker.kill_signal_sent or kills)
        return worker, [*announced, SendSignal(worker.number, kill_escalation.SIGNALS[step])]


def _gone(worker: Incarnation) -> Incarnation:
    before = worker.state if worker.state != "gone" else worker.state_before_gone
    return replace(worker, state="gone", state_before_gone=before)


def _finish(worker: Incarnation, verdict: Verdict | None) -> WorkerStep:
    return _announce_loss(replace(_gone(worker), verdict=verdict, finished=True))


def _announce_loss(worker: Incarnation) -> WorkerStep:
    """Returns the worker, marked as announced, and the action that announces its loss to front
    ends; no action if the worker is not lost, or its loss was announced before."""
    if worker.loss_announced or worker.verdict is None:
        return worker, []
    return replace(worker, loss_announced=True), [AnnounceLoss(worker, worker.verdict)]


def _final_verdict(worker: Incarnation, exited: ProcessExited) -> Verdict | None:
    """Returns the verdict on a worker whose process is gone; None if that is no loss: the worker
    was asked to leave, or left by itself to be replaced."""
    fault = worker.fault
    if worker.verdict is not None:
        verdict = worker.verdict
        if fault is not None and fault.first != verdict.first:
            verdict = replace(verdict, later=(*verdict.later, fault.first, *fault.later))
        # The worker itself knows best whether another one could do better.
        return replace(verdict, scope="model") if exited.status == Exit.CONFIGURATION else verdict
    left_as_asked = worker.forced or (worker.leave_requested and exited.status == Exit.BYE)
    if left_as_asked or exited.status == Exit.RECYCLED:
        return None
    return verdict_of_exit(
        exited.status,
        exited.stderr,
        worker.bye,
        sent_by_us=worker.kill_signal_sent,
        oom_evidence=exited.oom_evidence,
    )
