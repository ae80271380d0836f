"""One process of a slot, as far as the reaper knows it: what it said, and when it must speak or
move next.

How a worker is made to go: step by step, each with a time to work in.

::

    ORDERLY   drain --grace--> terminate ---> stacks ---> kill     recycled, stopped
    WHILE_STARTING             terminate ---> kill                 stopped while it loads
    WEDGED    stacks --------> terminate ---> kill                 no progress
    LEAVING   (wait) --------> stacks ------> kill                 said that it goes, and stays
    AT_ONCE                                   kill                 silent; an impatient operator

Stacks (SIGUSR2: ``faulthandler`` writes those of every thread to stderr, with the GIL held too)
come first for a worker that is wedged: what SIGTERM ends cannot be looked at any more.

What a slot wants done.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from typing import Literal

from mayfly_protocol.lifecycle import Beat, Bye, Cause, Fault, Loading, Ready, ToSlot, WorkPhase
from mayfly_protocol.roster import SlotState
from mayfly_reaper.rules.events import Exited
from mayfly_reaper.rules.exit_cause import Verdict
from mayfly_reaper.rules.mitigations import NONE, Precautions
from mayfly_reaper.settings import Budgets

Rung = Literal["drain", "terminate", "stacks", "kill"]
Ladder = tuple[Rung, ...]

ORDERLY: Ladder = ("drain", "terminate", "stacks", "kill")
WHILE_STARTING: Ladder = ("terminate", "kill")
WEDGED: Ladder = ("stacks", "terminate", "kill")
LEAVING: Ladder = ("stacks", "kill")
AT_ONCE: Ladder = ("kill",)

SIGNALS: dict[Rung, signal.Signals] = {
    "terminate": signal.SIGTERM,
    "stacks": signal.SIGUSR2,
    "kill": signal.SIGKILL,
}


def time_to_leave(weight_bytes: int, budgets: Budgets) -> float:
    """Seconds from a worker's last word to the end of its process."""
    return budgets.leave_s + _teardown_s(weight_bytes, budgets)


def patience(rung: Rung, grace_s: float, weight_bytes: int, budgets: Budgets) -> float:
    """Seconds from a rung to the next one; ``grace_s`` is what a drain was given."""
    match rung:
        case "drain":
            return grace_s + time_to_leave(weight_bytes, budgets)
        case "terminate":
            return budgets.terminate_s + _teardown_s(weight_bytes, budgets)
        case "stacks":
            return budgets.stacks_s
        case "kill":
            return float("inf")  # nothing is stronger: the kernel ends it when it can


def _teardown_s(weight_bytes: int, budgets: Budgets) -> float:
    return budgets.teardown_s_per_gb * weight_bytes / 1e9


STARTING: frozenset[SlotState] = frozenset({"spawning", "loading", "canary"})
SURVIVED_KEPT = 8


@dataclass(frozen=True, slots=True)
class Survived:
    """A fault that the worker outlived, and when."""

    at: float
    fault: Fault


@dataclass(frozen=True, slots=True)
class Incarnation:
    """``heard_at`` is the time of the last message, ``moved_at`` of the last that showed
    progress. All times are of the reaper's monotonic clock, in seconds.

    ``verdict`` is why the reaper, or the worker itself, has given up on it; ``asked`` that it was
    told to go though nothing is wrong with it, ``hurried`` that it had no chance to do it well,
    ``signalled`` that it was sent a signal that ends processes.
    """

    number: int
    spawned_at: float
    heard_at: float
    moved_at: float
    state: SlotState = "spawning"
    before: SlotState = "spawning"
    """The state that it was in before it was GONE."""
    pid: int = 0
    share: float = 0.5
    """Where in the range of its lifetime it will be replaced: in [0, 1)."""
    trial: bool = False
    """Its predecessors failed in a row, and it has not held for long yet."""
    loading: Loading | None = None
    ready: Ready | None = None
    ready_at: float | None = None
    beat: Beat | None = None
    footprint: int = 0
    """The most memory that it was ever seen with ..."""
    needs: int = 0
    """... and what it had when it became READY, in bytes."""
    stepped: frozenset[WorkPhase] = frozenset()
    """The phases in which a step was seen to end."""
    survived: tuple[Survived, ...] = ()
    """The last of them."""
    fault: Fault | None = None
    bye: Bye | None = None
    verdict: Verdict | None = None
    announced: bool = False
    """Everyone has been told that it is lost."""
    asked: bool = False
    hurried: bool = False
    signalled: bool = False
    ladder: Ladder = ()
    """The rungs that are left ..."""
    climb_at: float = 0.0
    """... and when the first of them is due."""
    grace_s: float = 0.0
    exit: Exited | None = None
    exited_at: float = 0.0
    over: bool = False
    """Its process is gone and has been judged; ``verdict`` is None where it went in good order."""

    @property
    def weight_bytes(self) -> int:
        return self.ready.card.weight_bytes if self.ready is not None else 0

    @property
    def served_s(self) -> float:
        """For how long it was READY, of one whose process is gone."""
        return self.exited_at - self.ready_at if self.ready_at is not None else 0.0


@dataclass(frozen=True, slots=True)
class Limit:
    """When an incarnation will be called lost, if it neither speaks nor moves until then."""

    at: float
    kind: Literal["silent", "wedged"]
    text: str

    def verdict(self) -> Verdict:
        return Verdict(self.kind, "worker", Cause("Budget", self.text))


def with_loading(life: Incarnation, loading: Loading, now: float) -> Incarnation:
    moved = loading != life.loading
    return replace(life, loading=loading, moved_at=now if moved else life.moved_at)


def with_beat(life: Incarnation, beat: Beat, now: float) -> Incarnation:
    """Takes a beat in: it moves the worker if its phase or its progress is another one, or if
    there is nothing that should move."""
    last = life.beat
    footprint = beat.memory.footprint
    life = replace(life, footprint=max(life.footprint, footprint))
    if life.ready is not None and last is None:
        life = replace(life, needs=footprint)
    if last is None:
        return replace(life, beat=beat, moved_at=now)
    moved = not _busy(beat) or (beat.phase, beat.progress) != (last.phase, last.progress)
    return replace(
        life,
        beat=beat,
        stepped=life.stepped | _ended(last, beat),
        moved_at=now if moved else life.moved_at,
    )


def _ended(last: Beat, beat: Beat) -> set[WorkPhase]:
    """The phases in which a step has ended between two beats. Chunks of short prompts end long
    before a beat finds the engine at one of them, so what was counted says it, too."""
    ended: set[WorkPhase] = {last.phase} if beat.progress > last.progress else set()
    if beat.prefill_s.count > last.prefill_s.count:
        ended.add("prefill")
    if beat.decode_s.count > last.decode_s.count:
        ended.add("decode")
    return ended


def with_survived(life: Incarnation, fault: Fault, now: float) -> Incarnation:
    return replace(life, survived=(*life.survived, Survived(now, fault))[-SURVIVED_KEPT:])


def with_pause(life: Incarnation, gap: float) -> Incarnation:
    """Takes out a time in which the reaper itself did not run, so that a machine that slept
    finds no worker late."""
    return replace(
        life,
        heard_at=life.heard_at + gap,
        moved_at=life.moved_at + gap,
        climb_at=life.climb_at + gap,
    )


def limit(life: Incarnation, budgets: Budgets) -> Limit:
    """The earlier of the two ends of the reaper's patience."""
    silence, what = _silence(life.state, budgets)
    silent = Limit(life.heard_at + silence, "silent", f"{what} for {silence:g} s")
    stillness, what = _stillness(life, budgets)
    still = Limit(life.moved_at + stillness, "wedged", f"{what} for {stillness:g} s")
    return silent if silent.at <= still.at else still


def _busy(beat: Beat) -> bool:
    # An idle engine beside requests that are owed something is the phantom of a wedge. Those that
    # are still prepared are not the engine's: to tokenize a long prompt may take a minute.
    return beat.phase != "idle" or beat.running > 0 or beat.waiting > beat.preparing


def _silence(state: SlotState, budgets: Budgets) -> tuple[float, str]:
    if state == "spawning":
        return budgets.hello_s, "no word since it was started"
    if state in STARTING:
        return budgets.load_silent_s, "no word while loading"
    return budgets.silent_s, "no heartbeat"


def _stillness(life: Incarnation, budgets: Budgets) -> tuple[float, str]:
    if life.state == "spawning":
        return float("inf"), "starting"
    if life.state in STARTING:
        phase = life.loading.phase if life.loading is not None else "starting"
        return budgets.load_still_s, f"no progress while {phase}"
    beat = life.beat
    if beat is None or not _busy(beat):
        return float("inf"), "idle"
    if beat.phase == "stopping":
        return float("inf"), "stopping"  # the ladder has its own times
    step = budgets.decode_s if beat.phase == "decode" else budgets.prefill_s
    if beat.phase not in life.stepped:
        step *= budgets.first_factor
    what = f"no progress in {beat.phase} ({beat.running} running, {beat.waiting} waiting)"
    return step, what


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start a process; to be answered with ``Started`` or ``NotStarted``."""

    incarnation: int
    precautions: Precautions = NONE


@dataclass(frozen=True, slots=True)
class Send:
    incarnation: int
    message: ToSlot


@dataclass(frozen=True, slots=True)
class Signal:
    incarnation: int
    number: int


@dataclass(frozen=True, slots=True)
class Lose:
    """From now on a worker is lost to everyone, though its process may not be gone yet."""

    life: Incarnation
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Record:
    """The process of a lost worker is gone: ``life`` and ``verdict`` are final, ``done`` says what
    follows."""

    life: Incarnation
    verdict: Verdict
    done: str


@dataclass(frozen=True, slots=True)
class WipeKernels:
    """Remove the slot's compiled kernels. No process uses them now."""


Action = Spawn | Send | Signal | Lose | Record | WipeKernels
