"""What a slot wants done."""

from __future__ import annotations

from dataclasses import dataclass

from mayfly_protocol.lifecycle import ToSlot
from mayfly_reaper.incarnation import Incarnation
from mayfly_reaper.precautions import NONE, Precautions
from mayfly_reaper.verdict import Verdict


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
