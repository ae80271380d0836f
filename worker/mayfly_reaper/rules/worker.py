"""The life of one incarnation: what its words, its silence and its exit mean.

::

    SPAWNING --Hello--> LOADING --canary--> CANARY --Ready--> READY --asked, worn--> DRAINING
        |                  |                  |                 |                       |
        +------------------+--------+---------+-----------------+-----------------------+
                                    |
              Fault, Bye, silent, no progress, exit; too late to leave
                                    v
                                  GONE --exited, and its last words are in--> over

GONE is what it is for everyone else from the verdict on, while its process may still have to be
killed: front ends move its requests then, not at the exit. What follows for its slot is not
decided here: see :mod:`mayfly_reaper.rules.slot`.
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
from mayfly_reaper.rules import exit_cause as verdicts
from mayfly_reaper.rules import incarnation as ladders
from mayfly_reaper.rules import incarnation as with_
from mayfly_reaper.rules.events import Ended, Exited, NotStarted, OfLife, Said, Started, Tick
from mayfly_reaper.rules.exit_cause import Verdict
from mayfly_reaper.rules.incarnation import (
    SIGNALS,
    STARTING,
    Action,
    Incarnation,
    Ladder,
    Lose,
    Send,
    Signal,
)
from mayfly_reaper.settings import Budgets

LAST_WORDS_S = 0.05
"""An exit is noticed sooner than the message that was sent before it: so long the reaper waits
for the worker's own account before it judges by the exit status."""

OVERSTAYED = Verdict(
    "wedged", "worker", Cause("Budget", "did not leave in the time that it was given")
)

Step = tuple[Incarnation, list[Action]]


class LifeRules:
    """A pure function, with the budgets that it goes by."""

    def __init__(self, budgets: Budgets) -> None:
        self._budgets = budgets

    def step(self, life: Incarnation, event: OfLife | Tick, now: float) -> Step:
        """What an event makes of an incarnation, and what is to be done about it."""
        match event:
            case Tick():
                return self._tick(life, now)
            case Started(_, pid):
                return replace(life, pid=pid), []
            case NotStarted(_, reason):
                cause = Verdict("not_started", "machine", Cause("OSError", reason))
                return self._over(replace(life, exited_at=now), cause)
            case Ended():
                return _gone(life), []
            case Exited():
                return self._exited(life, event, now)
            case Said(_, message):
                return self._said(replace(life, heard_at=now), message, now)

    def drain(self, life: Incarnation, grace_s: float, now: float) -> Step:
        """Lets it finish what it has, for so long, and go."""
        life = replace(life, state="draining", asked=True, grace_s=grace_s)
        return self._climb(replace(life, ladder=ladders.ORDERLY), now)

    def stop(self, life: Incarnation, grace_s: float, hurry: bool, now: float) -> Step:
        """Makes it go, whatever it is doing."""
        if life.exit is not None:
            return life, []
        if hurry:
            life = replace(life, asked=True, hurried=True, ladder=ladders.AT_ONCE)
            return self._climb(_gone(life), now)
        if life.state == "gone":
            return life, []
        if life.state in STARTING:
            life = replace(life, asked=True, hurried=True, ladder=ladders.WHILE_STARTING)
            return self._climb(_gone(life), now)
        return self.drain(life, grace_s, now)

    def due(self, life: Incarnation) -> float:
        """When a tick will next do something; infinite if none will."""
        if life.exit is not None:
            return life.exited_at + LAST_WORDS_S
        times = [life.climb_at] if life.ladder else []
        if life.state != "gone":
            times.append(with_.limit(life, self._budgets).at)
        if life.trial and life.ready_at is not None:
            times.append(life.ready_at + self._budgets.trial_s)
        return min(times, default=float("inf"))

    # -- time ------------------------------------------------------------------------------

    def _tick(self, life: Incarnation, now: float) -> Step:
        life = self._tried(life, now)
        if now < self.due(life):
            return life, []
        if life.exit is not None:
            return self._judge(life, life.exit)
        if life.state != "gone":
            limit = with_.limit(life, self._budgets)
            if now >= limit.at:
                ladder = ladders.WEDGED if limit.kind == "wedged" else ladders.AT_ONCE
                return self._condemn(life, limit.verdict(), ladder, now)
        return self._climb(life, now)

    def _tried(self, life: Incarnation, now: float) -> Incarnation:
        """Ends a trial that was long enough."""
        if not life.trial or life.ready_at is None:
            return life
        done = life.beat.inferences if life.beat is not None else 0
        held = now >= life.ready_at + self._budgets.trial_s
        if held or done >= self._budgets.trial_inferences:
            return replace(life, trial=False)
        return life

    # -- words -----------------------------------------------------------------------------

    def _said(self, life: Incarnation, message: ToReaper, now: float) -> Step:
        match message:
            case Fault() | Bye():
                return self._last_words(life, message, now)
            case Hello() if life.state == "spawning":
                return replace(life, state="loading", moved_at=now), []
            case Loading() if life.state in STARTING:
                state: SlotState = "canary" if message.phase == "canary" else "loading"
                return with_.with_loading(replace(life, state=state), message, now), []
            case Ready() if life.state in STARTING:
                life = replace(life, state="ready", ready=message, beat=None)
                return replace(life, ready_at=now, moved_at=now), []
            case Beat():
                return self._tried(with_.with_beat(life, message, now), now), []
            case _:  # out of its time: it shows that the worker lives, no more
                return life, []

    def _last_words(self, life: Incarnation, message: Fault | Bye, now: float) -> Step:
        if isinstance(message, Bye):
            life = replace(life, bye=message)
        elif message.scope in ("request", "batch"):
            return self._survived(life, message, now)
        elif message.scope == "recycle":
            return self._worn(with_.with_survived(life, message, now), now)
        else:
            verdict = life.verdict or verdicts.of_fault(message)
            life = replace(life, fault=life.fault or message, verdict=verdict)
        if life.exit is not None:
            return self._judge(life, life.exit)
        if life.state == "gone":
            return life, []  # the first verdict stands, and its ladder
        leave_by = now + ladders.time_to_leave(life.weight_bytes, self._budgets)
        life = replace(_gone(life), ladder=ladders.LEAVING, climb_at=leave_by)
        return _announced(life)

    def _survived(self, life: Incarnation, fault: Fault, now: float) -> Step:
        life = with_.with_survived(life, fault, now)
        since = now - self._budgets.batch_window_s
        lately = [each for each in life.survived if each.at > since and each.fault.scope == "batch"]
        if len(lately) >= self._budgets.batch_faults:
            return self._worn(life, now)
        return life, []

    def _worn(self, life: Incarnation, now: float) -> Step:
        """It would not be good for long."""
        if life.state != "ready":
            return life, []
        return self.drain(life, self._budgets.drain_s, now)

    # -- the end ---------------------------------------------------------------------------

    def _exited(self, life: Incarnation, event: Exited, now: float) -> Step:
        life = replace(_gone(life), exit=event, exited_at=now, ladder=())
        if life.fault is not None or life.bye is not None:
            return self._judge(life, event)
        return life, []

    def _condemn(self, life: Incarnation, verdict: Verdict, ladder: Ladder, now: float) -> Step:
        life, announced = _announced(replace(_gone(life), verdict=verdict, ladder=ladder))
        life, actions = self._climb(life, now)
        return life, [*announced, *actions]

    def _climb(self, life: Incarnation, now: float) -> Step:
        rung, *rest = life.ladder
        wait = ladders.patience(rung, life.grace_s, life.weight_bytes, self._budgets)
        life = replace(life, ladder=tuple(rest), climb_at=now + wait)
        if rung == "drain":
            return life, [Send(life.number, Drain(life.grace_s))]
        announced: list[Action] = []
        if rung == "kill" and not life.hurried:
            life, announced = _announced(replace(_gone(life), verdict=life.verdict or OVERSTAYED))
        life = replace(life, signalled=life.signalled or rung in ("terminate", "kill"))
        return life, [*announced, Signal(life.number, SIGNALS[rung])]

    def _judge(self, life: Incarnation, exited: Exited) -> Step:
        return self._over(life, _verdict(life, exited))

    def _over(self, life: Incarnation, verdict: Verdict | None) -> Step:
        return _announced(replace(_gone(life), verdict=verdict, over=True))


def _gone(life: Incarnation) -> Incarnation:
    before = life.state if life.state != "gone" else life.before
    return replace(life, state="gone", before=before)


def _announced(life: Incarnation) -> Step:
    """Tells of a loss, once."""
    if life.announced or life.verdict is None:
        return life, []
    return replace(life, announced=True), [Lose(life, life.verdict)]


def _verdict(life: Incarnation, exited: Exited) -> Verdict | None:
    """What to make of an exit: None if the worker went as it was told to, or recycled itself."""
    fault = life.fault
    if life.verdict is not None:
        verdict = life.verdict
        if fault is not None and fault.first != verdict.first:
            verdict = replace(verdict, later=(*verdict.later, fault.first, *fault.later))
        # The worker itself knows best whether another one could do better.
        return replace(verdict, scope="model") if exited.status == Exit.CONFIGURATION else verdict
    obeyed = life.hurried or (life.asked and exited.status == Exit.BYE)
    if obeyed or exited.status == Exit.RECYCLED:
        return None
    return verdicts.of_exit(
        exited.status,
        exited.stderr,
        life.bye,
        sent_by_us=life.signalled,
        starved=exited.starved,
    )
