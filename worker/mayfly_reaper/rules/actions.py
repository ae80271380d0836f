"""Actions: everything that the rules of a slot can ask the reaper to do."""

from __future__ import annotations

from dataclasses import dataclass

from mayfly_protocol.lifecycle import ToSlot
from mayfly_reaper.rules.exit_cause import Verdict
from mayfly_reaper.rules.incarnation import Incarnation
from mayfly_reaper.rules.mitigations import NO_MITIGATIONS, Mitigations


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start a worker process; the event ``ProcessStarted`` or ``SpawnFailed`` reports the
    result."""

    incarnation: int
    mitigations: Mitigations = NO_MITIGATIONS


@dataclass(frozen=True, slots=True)
class SendMessage:
    """Send a message to a worker."""

    incarnation: int
    message: ToSlot


@dataclass(frozen=True, slots=True)
class SendSignal:
    """Send a signal to a worker's process."""

    incarnation: int
    number: int


@dataclass(frozen=True, slots=True)
class AnnounceLoss:
    """Publish to front ends that a worker is lost, though its process may not be gone yet."""

    worker: Incarnation
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class RecordLoss:
    """Write the crash record (autopsy) of a lost worker whose process is gone. ``worker`` and
    ``verdict`` are final; ``done`` says what the slot does next."""

    worker: Incarnation
    verdict: Verdict
    done: str


@dataclass(frozen=True, slots=True)
class WipeKernels:
    """Remove the compiled CUDA kernels cached for the slot; no process uses them now."""


Action = Spawn | SendMessage | SendSignal | AnnounceLoss | RecordLoss | WipeKernels
