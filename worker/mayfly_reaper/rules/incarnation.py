"""Incarnation: one worker process of a slot, with all that the reaper knows about the process."""

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
    """A fault that a worker survived, and the time at which the worker reported the fault."""

    at: float
    fault: Fault


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One worker process of a slot. Times are by the reaper's monotonic clock, in seconds.

    ``verdict`` is the reason why the reaper, or the worker itself, has given the worker up.
    """

    number: int
    spawned_at: float
    last_message_at: float
    last_progress_at: float
    """The time of the worker's last message that showed progress."""
    state: SlotState = "spawning"
    state_before_gone: SlotState = "spawning"
    pid: int = 0
    recycle_jitter: float = 0.5
    """Random number in [0, 1) that places the worker's planned replacement within a range of its
    lifetime, so that workers are not replaced together."""
    trial: bool = False
    """True if the worker is on trial (the last choice of front ends): the workers before it failed
    in a row, and this worker has not served for long yet."""
    loading: Loading | None = None
    ready: Ready | None = None
    ready_at: float | None = None
    beat: Beat | None = None
    peak_footprint: int = 0
    """The largest memory footprint that the worker has reported, in bytes."""
    footprint_when_ready: int = 0
    """The memory footprint that the worker reported first after it became READY, in bytes."""
    phases_stepped: frozenset[WorkPhase] = frozenset()
    """The phases (such as prefill or decode) in which the worker was seen to complete a step."""
    survived: tuple[SurvivedFault, ...] = ()
    """The last faults that the worker survived, at most :data:`SURVIVED_FAULTS_KEPT`."""
    fault: Fault | None = None
    bye: Bye | None = None
    verdict: Verdict | None = None
    loss_announced: bool = False
    leave_requested: bool = False
    """True if the reaper has asked the worker to leave though nothing is wrong with it."""
    forced: bool = False
    """True if the worker was ended in a way that leaves it no time for an orderly exit."""
    kill_signal_sent: bool = False
    """True if the reaper has sent the worker a signal that ends processes."""
    escalation: Escalation = ()
    """The remaining steps (signals, in the end SIGKILL) of ending the worker's process."""
    escalate_at: float = 0.0
    """The time of the first step in ``escalation``, the remaining steps of ending the process."""
    grace_s: float = 0.0
    exit: ProcessExited | None = None
    exited_at: float = 0.0
    finished: bool = False
    """True if the worker's process is gone and its verdict is final; ``verdict`` is None after an
    orderly exit."""

    @property
    def weight_bytes(self) -> int:
        return self.ready.card.weight_bytes if self.ready is not None else 0

    @property
    def served_s(self) -> float:
        """Seconds from the worker's becoming READY to its exit; 0 if it never became READY."""
        return self.exited_at - self.ready_at if self.ready_at is not None else 0.0

    def shifted_by(self, gap_s: float) -> Incarnation:
        """Returns the worker with its deadlines moved by ``gap_s`` seconds in which the reaper
        itself did not run, so that a machine that slept finds no worker late."""
        return replace(
            self,
            last_message_at=self.last_message_at + gap_s,
            last_progress_at=self.last_progress_at + gap_s,
            escalate_at=self.escalate_at + gap_s,
        )
