"""The life of a slot: every decision of the reaper about one worker and its successors.

::

              Spawn            Hello              canary             Ready
    BACKOFF --------> SPAWNING -----> LOADING ------------> CANARY --------> READY
       ^  ^               |              |                    |                |
       |  |               |  silent, no progress, Fault, Bye, exit             |  recycle,
       |  |               +--------------+----------+---------+----------------+  stop
       |  |                                         |                          v
       |  |                                         v     likewise, or late    |
       |  |                                       GONE <-------------------- DRAINING
       |  |                                         |
       |  +---- after a delay, or none -------------+  exited, and its last words are in
       |                                            |
       |                                            +--> FAILED   configuration that cannot work
       |  recycle                                   |       |
       +--------------------------------------------|-------+
                                                    +--> GONE     the node stops

GONE is what an incarnation is for everyone else from the verdict on, while its process may still
have to be killed: front ends move its requests then, not at the exit. With BACKOFF's delay at
nothing the next incarnation is spawned in the same step.

The decisions are a pure function, ``(slot, event, now) -> (slot, actions)``. What it needs from
the world is injected: a monotonic clock as ``now``, a random draw, and a counter that never gives
an incarnation's number twice in a node. Messages of an incarnation that is over change nothing
and are counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

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
from mayfly_reaper import incarnation as life_of
from mayfly_reaper import ladder as ladders
from mayfly_reaper import verdict as verdicts
from mayfly_reaper.actions import Action, Record, Send, Signal, Spawn
from mayfly_reaper.backoff import delay
from mayfly_reaper.events import (
    Event,
    Exited,
    NotStarted,
    RecycleAsked,
    Said,
    Started,
    StopAsked,
    Tick,
)
from mayfly_reaper.incarnation import STARTING, Incarnation
from mayfly_reaper.ladder import SIGNALS, Ladder
from mayfly_reaper.settings import Budgets
from mayfly_reaper.verdict import Verdict

PAUSE_S = 3.0
"""The node looks at every slot at least once a second: a longer gap between two events is one in
which the machine slept or the reaper was stopped, and no worker's fault."""

LAST_WORDS_S = 0.05
"""An exit is noticed sooner than the message that was sent before it: so long the reaper waits
for the worker's own account before it judges by the exit status."""

OVERSTAYED = Cause("Budget", "did not leave in the time that it was given")


@dataclass(frozen=True, slots=True)
class Slot:
    """``incarnation`` is the number of ``life``, or of the last one where there is none.
    ``strikes`` are the losses in a row that lengthen the back-off. ``phase`` is the state that an
    incarnation was in before it was GONE. ``late`` counts what incarnations that were over still
    sent."""

    name: str
    state: SlotState
    seen_at: float
    life: Incarnation | None = None
    incarnation: int = 0
    phase: SlotState = "backoff"
    strikes: int = 0
    retry_at: float = 0.0
    detail: str = ""
    stopping: bool = False
    late: int = 0


Step = tuple[Slot, list[Action]]


class SlotRules:
    """The function, with what it needs from the world.

    Args:
        draw: uniform in [0, 1), for the jitter.
        number: the next incarnation's, unique in the node and growing.
    """

    def __init__(
        self, budgets: Budgets, draw: Callable[[], float], number: Callable[[], int]
    ) -> None:
        self._budgets = budgets
        self._draw = draw
        self._number = number

    def begin(self, name: str, now: float) -> Slot:
        """A slot whose first worker the next tick spawns."""
        return Slot(name=name, state="backoff", seen_at=now, retry_at=now)

    def step(self, slot: Slot, event: Event, now: float) -> Step:
        """What an event makes of a slot, and what is to be done about it, in that order."""
        slot = _without_pause(slot, now)
        match event:
            case Tick():
                return self._tick(slot, now)
            case RecycleAsked():
                return self._recycle(slot, now)
            case StopAsked(hurry):
                return self._stop(slot, hurry, now)
            case Started(number, pid):
                life = _current(slot, number)
                return (replace(slot, life=replace(life, pid=pid)) if life else slot), []
            case NotStarted(number, reason):
                life = _current(slot, number)
                if life is None:
                    return slot, []
                cause = Verdict("not_started", "machine", Cause("OSError", reason))
                return self._end(slot, replace(life, exited_at=now), cause, now)
            case Exited(number):
                life = _current(slot, number)
                return self._exited(slot, life, event, now) if life else (slot, [])
            case Said(number, message):
                life = _current(slot, number)
                if life is None:
                    return replace(slot, late=slot.late + 1), []
                return self._said(slot, replace(life, heard_at=now), message, now)

    def due(self, slot: Slot) -> float:
        """When a tick will next do something, by the same clock; infinite if none will."""
        life = slot.life
        if life is None:
            return slot.retry_at if slot.state == "backoff" else float("inf")
        if life.exit is not None:
            return life.exited_at + LAST_WORDS_S
        times = [life.climb_at] if life.ladder else []
        if slot.state != "gone":
            times.append(life_of.limit(slot.state, life, self._budgets).at)
        return min(times, default=float("inf"))

    # -- events ----------------------------------------------------------------------------

    def _tick(self, slot: Slot, now: float) -> Step:
        if now < self.due(slot):
            return slot, []
        life = slot.life
        if life is None:
            return self._spawn(slot, now)
        if life.exit is not None:
            return self._judge(slot, life, life.exit, now)
        if slot.state != "gone":
            limit = life_of.limit(slot.state, life, self._budgets)
            if now >= limit.at:
                ladder = ladders.WEDGED if limit.kind == "wedged" else ladders.AT_ONCE
                return self._condemn(slot, life, limit.verdict(), ladder, now)
        return self._climb(slot, life, now)

    def _said(self, slot: Slot, life: Incarnation, message: ToReaper, now: float) -> Step:
        heard = replace(slot, life=life)
        match message:
            case Fault() | Bye():
                return self._last_words(heard, life, message, now)
            case Hello() if slot.state == "spawning":
                return replace(heard, state="loading"), []
            case Loading() if slot.state in STARTING:
                life = life_of.with_loading(life, message, now)
                state: SlotState = "canary" if message.phase == "canary" else "loading"
                return replace(heard, state=state, life=life), []
            case Ready() if slot.state in STARTING:
                life = replace(life, ready=message, ready_at=now, moved_at=now, beat=None)
                return replace(heard, state="ready", life=life, detail=""), []
            case Beat():
                return replace(heard, life=life_of.with_beat(life, message, now)), []
            case _:  # out of its time: it shows that the worker lives, no more
                return heard, []

    def _last_words(self, slot: Slot, life: Incarnation, message: Fault | Bye, now: float) -> Step:
        if isinstance(message, Bye):
            life = replace(life, bye=message)
            leaving = None
        elif message.scope in ("request", "batch"):
            return slot, []  # it goes on
        elif message.scope == "recycle":
            return self._recycle(slot, now)
        else:
            life = replace(life, fault=life.fault or message)
            leaving = verdicts.of_fault(message)
        if life.verdict is None:
            life = replace(life, verdict=leaving)
        if life.exit is not None:
            return self._judge(slot, life, life.exit, now)
        if slot.state == "gone":
            return replace(slot, life=life), []  # the first verdict stands, and its ladder
        leave_by = now + ladders.time_to_leave(life.weight_bytes, self._budgets)
        life = replace(life, ladder=ladders.LEAVING, climb_at=leave_by)
        return _gone(slot, life), []

    def _exited(self, slot: Slot, life: Incarnation, event: Exited, now: float) -> Step:
        life = replace(life, exit=event, exited_at=now, ladder=())
        if life.fault is not None or life.bye is not None:
            return self._judge(slot, life, event, now)
        return _gone(slot, life), []

    def _recycle(self, slot: Slot, now: float) -> Step:
        if slot.stopping:
            return slot, []
        if slot.life is None:
            return self._spawn(slot, now)
        if slot.state != "ready":
            return slot, []  # on its way out, or in: there is nothing worn to replace
        return self._drain(slot, slot.life, self._budgets.drain_s, now)

    def _stop(self, slot: Slot, hurry: bool, now: float) -> Step:
        slot = replace(slot, stopping=True)
        life = slot.life
        if life is None:
            return replace(slot, state="gone", detail="stopped"), []
        if life.exit is not None:
            return slot, []
        if hurry:
            life = replace(life, asked=True, hurried=True, ladder=ladders.AT_ONCE)
            return self._climb(_gone(slot, life), life, now)
        if slot.state == "gone":
            return slot, []
        if slot.state in STARTING:
            life = replace(life, asked=True, hurried=True, ladder=ladders.STARTING)
            return self._climb(_gone(slot, life), life, now)
        return self._drain(slot, life, self._budgets.stop_s, now)

    # -- what follows ----------------------------------------------------------------------

    def _spawn(self, slot: Slot, now: float) -> Step:
        number = self._number()
        life = life_of.spawned(number, now)
        slot = replace(slot, state="spawning", phase="spawning", life=life, incarnation=number)
        return slot, [Spawn(number)]

    def _drain(self, slot: Slot, life: Incarnation, grace_s: float, now: float) -> Step:
        life = replace(life, asked=True, grace_s=grace_s, ladder=ladders.ORDERLY)
        return self._climb(replace(slot, state="draining"), life, now)

    def _condemn(
        self, slot: Slot, life: Incarnation, verdict: Verdict, ladder: Ladder, now: float
    ) -> Step:
        life = replace(life, verdict=verdict, ladder=ladder)
        return self._climb(_gone(slot, life), life, now)

    def _climb(self, slot: Slot, life: Incarnation, now: float) -> Step:
        rung, *rest = life.ladder
        wait = ladders.patience(rung, life.grace_s, life.weight_bytes, self._budgets)
        life = replace(life, ladder=tuple(rest), climb_at=now + wait)
        if rung == "kill" and life.verdict is None and not life.hurried:
            life = replace(life, verdict=Verdict("wedged", "worker", OVERSTAYED))
        if rung == "drain":
            action: Action = Send(life.number, Drain(life.grace_s))
        else:
            action = Signal(life.number, SIGNALS[rung])
        return replace(slot, life=life), [action]

    def _judge(self, slot: Slot, life: Incarnation, exited: Exited, now: float) -> Step:
        return self._end(slot, life, _verdict(life, exited), now)

    def _end(self, slot: Slot, life: Incarnation, verdict: Verdict | None, now: float) -> Step:
        """The process is no more. ``verdict`` is None where it went as it was told to."""
        slot = replace(slot, life=None, incarnation=life.number)
        if slot.stopping:
            slot = replace(slot, state="gone", detail="stopped")
            done = "nothing: the node stops"
            return slot, _records(slot, life, verdict, done)
        if verdict is not None and verdict.scope == "model":
            slot = replace(slot, state="failed", detail=verdict.first.text)
            done = "nothing: this configuration cannot work"
            return slot, _records(slot, life, verdict, done)
        slot = self._with_retry(slot, life, verdict, now)
        if slot.retry_at <= now:
            records = _records(slot, life, verdict, "respawned at once")
            slot, actions = self._spawn(slot, now)
            return slot, [*records, *actions]
        done = f"back-off of {slot.retry_at - now:.1f} s"
        return slot, _records(slot, life, verdict, done)

    def _with_retry(
        self, slot: Slot, life: Incarnation, verdict: Verdict | None, now: float
    ) -> Slot:
        budgets = self._budgets
        served_s = life.exited_at - life.ready_at if life.ready_at is not None else 0.0
        strikes = 0 if served_s >= budgets.steady_s else slot.strikes
        served = life.ready_at is not None
        # Somebody's hand, or its own good order, is not held against a slot whose workers serve.
        innocent = verdict is None or verdict.kind in ("killed", "left")
        if served and innocent:
            wait = 0.0
        elif served and strikes == 0 and verdict is not None and verdict.scope != "machine":
            wait = 0.0
            strikes = 1
        else:
            strikes += 1
            wait = delay(strikes, budgets.retry_s, budgets.retry_max_s, self._draw())
        retry_at = max(now + wait, life.spawned_at + budgets.spacing_s)
        detail = verdict.text if verdict is not None else "recycled"
        return replace(slot, state="backoff", strikes=strikes, retry_at=retry_at, detail=detail)


def _current(slot: Slot, number: int) -> Incarnation | None:
    return slot.life if slot.life is not None and slot.life.number == number else None


def _without_pause(slot: Slot, now: float) -> Slot:
    gap = now - slot.seen_at
    slot = replace(slot, seen_at=now)
    if gap <= PAUSE_S or slot.life is None:
        return slot
    return replace(slot, life=life_of.with_pause(slot.life, gap))


def _gone(slot: Slot, life: Incarnation) -> Slot:
    """GONE, with the state that it was in kept for the autopsy."""
    phase = slot.state if slot.state != "gone" else slot.phase
    return replace(slot, state="gone", phase=phase, life=life)


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
    return verdicts.of_exit(exited.status, exited.stderr, life.bye)


def _records(slot: Slot, life: Incarnation, verdict: Verdict | None, done: str) -> list[Action]:
    return [] if verdict is None else [Record(life, verdict, slot.phase, done)]
