"""Incarnation: one worker process of a slot, as far as the reaper knows it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mayfly_protocol.lifecycle import Beat, Bye, Fault, Loading, Ready, WorkPhase
from mayfly_protocol.roster import SlotState
from mayfly_reaper.rules.events import ProcessExited
from mayfly_reaper.rules.exit_cause import Verdict
from mayfly_reaper.rules.kill_escalation import Escalation

STARTING: frozenset[SlotState] = frozenset({"spawning", "loading", "canary"})
SURVIVED_FAULTS_KEPT = 8


@dataclass(frozen=True, slots=True)
class SurvivedFault:
    """A fault that the worker survived, and the time of its message."""

    at: float
    fault: Fault


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One worker process. Times are of the reaper's monotonic clock, in seconds.

    ``verdict`` says why the reaper, or the worker itself, has given the worker up.
    """

    number: int
    spawned_at: float
    last_message_at: float
    last_progress_at: float
    """The time of the last message that showed progress."""
    state: SlotState = "spawning"
    state_before_gone: SlotState = "spawning"
    pid: int = 0
    recycle_jitter: float = 0.5
    """The point in the range of its lifetime at which it is due for a recycle: in [0, 1)."""
    trial: bool = False
    """Its predecessors failed in a row, and it has not served for long yet."""
    loading: Loading | None = None
    ready: Ready | None = None
    ready_at: float | None = None
    beat: Beat | None = None
    peak_footprint: int = 0
    """The largest memory footprint that it has reported, in bytes."""
    footprint_when_ready: int = 0
    """The memory footprint that it reported first after it became READY, in bytes."""
    phases_stepped: frozenset[WorkPhase] = frozenset()
    """The phases in which a step was seen to end."""
    survived: tuple[SurvivedFault, ...] = ()
    """The last faults that it survived, at most :data:`SURVIVED_FAULTS_KEPT`."""
    fault: Fault | None = None
    bye: Bye | None = None
    verdict: Verdict | None = None
    loss_announced: bool = False
    leave_requested: bool = False
    """The reaper has asked it to leave though nothing is wrong with it."""
    forced: bool = False
    """It was ended in a way that leaves it no time for an orderly exit."""
    kill_signal_sent: bool = False
    """It was sent a signal that ends processes."""
    escalation: Escalation = ()
    """The steps of the kill escalation that are left."""
    escalate_at: float = 0.0
    """The time of the first step in ``escalation``."""
    grace_s: float = 0.0
    exit: ProcessExited | None = None
    exited_at: float = 0.0
    finished: bool = False
    """Its process is gone and has been judged; ``verdict`` is None after an orderly exit."""

    @property
    def weight_bytes(self) -> int:
        return self.ready.card.weight_bytes if self.ready is not None else 0

    @property
    def served_s(self) -> float:
        """Seconds from READY to the exit; 0 for a worker that never was READY."""
        return self.exited_at - self.ready_at if self.ready_at is not None else 0.0

    def shifted_by(self, gap_s: float) -> Incarnation:
        """Returns the incarnation with its deadlines moved by a time in which the reaper itself
        did not run, so that a machine that slept finds no worker late."""
        return replace(
            self,
            last_message_at=self.last_message_at + gap_s,
            last_progress_at=self.last_progress_at + gap_s,
            escalate_at=self.escalate_at + gap_s,
        )
