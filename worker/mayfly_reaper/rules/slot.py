"""The life of a slot: every decision of the reaper about one worker and those that follow it.

::

              granted           life (mayfly_reaper.rules.worker)
    BACKOFF --------> SPAWNING, LOADING, CANARY, READY, DRAINING, GONE
       ^  ^                                                        | over
       |  +---- after a delay, or none ----------------------------+
       |  recycle                                                  |
       +------------------ FAILED <-- configuration that cannot ---+
                                      work                         |
                           GONE   <-- the node stops --------------+

A slot has one worker, its ``life``. While a worn one is replaced it may have two (a *surge*)::

    life         READY ..................... DRAINING ... over     becomes the predecessor
    successor    SPAWNING ... LOADING ... CANARY ... READY         becomes the life

A slot in BACKOFF whose time has come wants a worker, and is granted one or held, by what else goes
on in the machine: see :mod:`mayfly_reaper.machine.spawn_gate`.

If the successor is lost the life serves on; if the life is, the successor takes its place as far
as it has come. So there are never two that are READY, nor three.

The decisions are a pure function, ``(slot, event, now) -> (slot, actions)``. What it needs from
the world is injected: a monotonic clock as ``now``, a random draw, and a counter that never gives
an incarnation's number twice in a node. Messages of an incarnation that is over change nothing
and are counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from mayfly_protocol.roster import SlotState
from mayfly_reaper.rules import incarnation as with_
from mayfly_reaper.rules.backoff import backoff_s
from mayfly_reaper.rules.events import (
    Ended,
    Event,
    Exited,
    Granted,
    Held,
    HoldCause,
    NotStarted,
    OfLife,
    RecycleAsked,
    RecycleCause,
    Said,
    Started,
    StopAsked,
    Tick,
)
from mayfly_reaper.rules.exit_cause import INNOCENT, OUT_OF_MEMORY, PAUSED, Verdict
from mayfly_reaper.rules.incarnation import Action, Incarnation, Record, Spawn, WipeKernels
from mayfly_reaper.rules.mitigations import NONE, Precautions
from mayfly_reaper.rules.worker import LifeRules
from mayfly_reaper.settings import Budgets

PAUSE_S = 3.0
"""The node looks at every slot at least once a second: a longer gap between two events is one in
which the machine slept or the reaper was stopped, and no worker's fault."""

Role = Literal["life", "successor", "predecessor"]
ROLES: tuple[Role, ...] = ("life", "successor", "predecessor")


@dataclass(frozen=True, slots=True)
class Slot:
    """``rest`` is what a slot is while it has no life, ``incarnation`` the number of ``life``, or
    of the last one where there is none. ``strikes`` are the losses in a row that lengthen the
    back-off, ``last_kind`` is the last one's. ``late`` counts what incarnations that were over
    still sent.

    ``held`` is what keeps it from getting the worker that it wants.

    ``renewing`` is set from the beginning of a planned recycle to its end, ``renewal`` is what the
    last one was for; ``renew_at`` is when
    the next one may begin, after ``failed_renewals`` in a row. ``cramped``: a successor found too
    little memory beside the worker. ``wiped``: its compiled kernels were thrown away once.

    ``needs`` is the memory of a worker that has just become READY, in bytes; ``freed_at`` is when
    the last one's should have begun to be free again."""

    name: str
    seen_at: float
    rest: SlotState = "backoff"
    life: Incarnation | None = None
    successor: Incarnation | None = None
    predecessor: Incarnation | None = None
    incarnation: int = 0
    spawned_at: float = float("-inf")
    strikes: int = 0
    last_kind: str = ""
    precautions: Precautions = NONE
    wiped: bool = False
    retry_at: float = 0.0
    detail: str = ""
    stopping: bool = False
    renewing: bool = False
    renewal: RecycleCause = "asked"
    renew_at: float = 0.0
    failed_renewals: int = 0
    cramped: bool = False
    needs: int = 0
    freed_at: float = 0.0
    late: int = 0
    held: HoldCause | None = None

    @property
    def state(self) -> SlotState:
        return self.life.state if self.life is not None else self.rest

    @property
    def lives(self) -> list[tuple[Role, Incarnation]]:
        found = (self.life, self.successor, self.predecessor)
        return [(role, life) for role, life in zip(ROLES, found, strict=True) if life is not None]

    def having(self, role: Role, life: Incarnation | None) -> Slot:
        """The same with another one in a role."""
        match role:
            case "life":
                number = life.number if life is not None else self.incarnation
                return replace(self, life=life, incarnation=number)
            case "successor":
                return replace(self, successor=life)
            case "predecessor":
                return replace(self, predecessor=life)


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
        self._lives = LifeRules(budgets)

    def begin(self, name: str, now: float) -> Slot:
        """A slot that wants its first worker."""
        return Slot(name=name, seen_at=now, retry_at=now)

    def step(self, slot: Slot, event: Event, now: float) -> Step:
        """What an event makes of a slot, and what is to be done about it, in that order."""
        slot = _without_pause(slot, now)
        match event:
            case Tick():
                return self._tick(slot, now)
            case Granted():
                wanted = self.wants_worker(slot, now)
                return self._spawn(slot, "life", now) if wanted else (slot, [])
            case Held(until, reason, cause):
                wanted = self.wants_worker(slot, now)
                held = replace(slot, retry_at=until, detail=reason, held=cause)
                return (held if wanted else slot), []
            case RecycleAsked():
                return self._recycle(slot, event, now)
            case StopAsked():
                return self._stop(slot, event, now)
            case (
                Started(number) | NotStarted(number) | Ended(number) | Exited(number) | Said(number)
            ):
                if all(life.number != number for _, life in slot.lives):
                    return replace(slot, late=slot.late + isinstance(event, Said)), []
                return self._live(slot, number, event, now)

    def due(self, slot: Slot) -> float:
        """When a tick will next do something or a worker will be wanted, by the same clock;
        infinite if neither will be."""
        times = [self._lives.due(life) for _, life in slot.lives]
        if slot.state == "backoff":
            times.append(slot.retry_at)
        return min(times, default=float("inf"))

    def wants_worker(self, slot: Slot, now: float) -> bool:
        """Whether it has to be ``Granted`` one now, or ``Held``."""
        return slot.state == "backoff" and now >= slot.retry_at

    # -- events ----------------------------------------------------------------------------

    def _tick(self, slot: Slot, now: float) -> Step:
        actions: list[Action] = []
        due = [life.number for _, life in slot.lives if now >= self._lives.due(life)]
        for number in due:
            slot, more = self._live(slot, number, Tick(), now)
            actions += more
        return slot, actions

    def _live(self, slot: Slot, number: int, event: OfLife | Tick, now: float) -> Step:
        role, life = next(each for each in slot.lives if each[1].number == number)
        life, actions = self._lives.step(life, event, now)
        slot = slot.having(role, life)
        if life.over:
            slot, more = self._ended(slot, role, life, now)
        elif life.state == "ready":
            slot, more = self._serves(slot, role, now)
        else:
            more = []
        return slot, [*actions, *more]

    def _recycle(self, slot: Slot, asked: RecycleAsked, now: float) -> Step:
        if slot.stopping:
            return slot, []
        life = slot.life
        if life is None:
            return self._spawn(slot, "life", now)
        if life.state != "ready" or len(slot.lives) > 1:
            return slot, []  # on its way out, or in: there is nothing worn to replace
        slot = replace(slot, renewing=True, renewal=asked.cause, detail=asked.reason)
        if asked.surge:
            return self._spawn(slot, "successor", now)
        life, actions = self._lives.drain(life, self._budgets.drain_s, now)
        return slot.having("life", life), actions

    def _stop(self, slot: Slot, asked: StopAsked, now: float) -> Step:
        slot = replace(slot, stopping=True)
        if slot.life is None:
            slot = replace(slot, rest="gone", detail="stopped")
        grace_s = asked.grace_s if asked.grace_s is not None else self._budgets.stop_s
        actions: list[Action] = []
        for role, life in slot.lives:
            stopped, more = self._lives.stop(life, grace_s, asked.hurry, now)
            slot = slot.having(role, stopped)
            actions += more
        return slot, actions

    # -- what follows ----------------------------------------------------------------------

    def _spawn(self, slot: Slot, role: Role, now: float) -> Step:
        life = Incarnation(
            number=self._number(),
            spawned_at=now,
            heard_at=now,
            moved_at=now,
            share=self._draw(),
            trial=slot.strikes >= self._budgets.trial_losses,
        )
        slot = replace(slot.having(role, life), spawned_at=now, held=None)
        return slot, [Spawn(life.number, slot.precautions)]

    def _serves(self, slot: Slot, role: Role, now: float) -> Step:
        """One that is READY: a successor takes over."""
        if role == "predecessor":
            return slot, []
        if role == "life":
            if slot.successor is None and slot.predecessor is None:
                return replace(slot, renewing=False, detail=""), []
            return slot, []
        former, successor = slot.life, slot.successor
        if former is None:
            return slot, []  # the node stops
        actions: list[Action] = []
        if former.state == "ready":  # and not on its way out already
            former, actions = self._lives.drain(former, self._budgets.drain_s, now)
        slot = replace(slot, successor=None, predecessor=former, failed_renewals=0)
        return slot.having("life", successor), actions

    def _ended(self, slot: Slot, role: Role, life: Incarnation, now: float) -> Step:
        """A process is no more; its verdict is None where it went as it was told to."""
        verdict = life.verdict
        slot = replace(slot.having(role, None), needs=life.needs or slot.needs)
        if slot.stopping:
            slot = replace(slot, rest="gone", detail="stopped")
            return slot, _records(life, "nothing: the node stops")
        if role == "predecessor":
            slot = replace(slot, renewing=False)
            return slot, _records(life, "nothing: its successor serves")
        if verdict is not None:
            slot = self._learned(slot, life, verdict)
        if role == "successor":
            return self._without_successor(slot, life, now)
        renewing = slot.renewing and verdict is None
        slot = replace(slot, renewing=renewing, freed_at=life.exited_at)
        if slot.successor is not None:
            slot = replace(slot, successor=None, renewing=False).having("life", slot.successor)
            return slot, _records(life, "its successor, already on its way, takes its place")
        return self._respawn(slot, life, verdict, now)

    def _without_successor(self, slot: Slot, life: Incarnation, now: float) -> Step:
        """A surge came to nothing, and the worn worker serves on."""
        budgets = self._budgets
        failures = slot.failed_renewals + 1
        wait = backoff_s(failures, budgets.retry_s, budgets.retry_max_s, self._draw())
        slot = replace(
            slot,
            renewing=False,
            failed_renewals=failures,
            renew_at=now + wait,
            cramped=life.verdict is not None and life.verdict.kind in OUT_OF_MEMORY,
            detail="",
        )
        return slot, _records(life, f"the worker before it serves on; again in {wait:.1f} s")

    def _respawn(self, slot: Slot, life: Incarnation, verdict: Verdict | None, now: float) -> Step:
        if verdict is not None and verdict.scope == "model":
            if verdict.kind != "cuda_compile" or slot.wiped:
                slot = replace(slot, rest="failed", detail=verdict.first.text)
                return slot, _records(life, "not tried again: this configuration cannot work")
            # A kill in the middle of writing one leaves a broken file. Where kernels that were
            # compiled anew are no better, no file was to blame.
            slot = replace(slot, wiped=True)
            slot = self._with_retry(slot, life, verdict, now)
            done = f"its compiled kernels are removed; {self._plan(slot, now)}"
            return slot, [*_records(life, done), WipeKernels()]
        slot = self._with_retry(slot, life, verdict, now)
        return slot, _records(life, self._plan(slot, now))

    def _plan(self, slot: Slot, now: float) -> str:
        wait = slot.retry_at - now
        when = f"back-off of {wait:.1f} s" if wait > 0 else "respawned at once"
        return f"{when}, with {slot.precautions}" if slot.precautions != NONE else when

    def _with_retry(
        self, slot: Slot, life: Incarnation, verdict: Verdict | None, now: float
    ) -> Slot:
        budgets = self._budgets
        held = life.served_s >= budgets.steady_s
        strikes = 0 if held else slot.strikes
        served = life.ready_at is not None
        innocent = verdict is None or verdict.kind in INNOCENT
        hurts = verdict is not None and (verdict.scope == "machine" or verdict.kind in PAUSED)
        if served and innocent:
            wait = 0.0
        elif served and strikes == 0 and not hurts:
            wait = 0.0
            strikes = 1
        else:
            strikes += 1
            wait = backoff_s(strikes, budgets.retry_s, budgets.retry_max_s, self._draw())
        return replace(
            slot,
            rest="backoff",
            strikes=strikes,
            retry_at=max(now + wait, slot.spawned_at + budgets.spacing_s),
            detail=verdict.text if verdict is not None else "recycled",
            wiped=slot.wiped and not held,
        )

    def _learned(self, slot: Slot, life: Incarnation, verdict: Verdict) -> Slot:
        # One that was still loading had less than its weights: no measure for those that follow.
        footprint = life.footprint if life.ready is not None else 0
        precautions = slot.precautions.after(
            verdict.kind,
            slot.last_kind,
            footprint=footprint,
            weight_bytes=life.weight_bytes,
        )
        return replace(slot, precautions=precautions, last_kind=verdict.kind)


def _without_pause(slot: Slot, now: float) -> Slot:
    gap = now - slot.seen_at
    slot = replace(slot, seen_at=now)
    if gap > PAUSE_S:
        for role, life in slot.lives:
            slot = slot.having(role, with_.with_pause(life, gap))
    return slot


def _records(life: Incarnation, done: str) -> list[Action]:
    return [Record(life, life.verdict, done)] if life.verdict is not None else []
