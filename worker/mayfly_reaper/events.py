"""What can happen to a slot."""

from __future__ import annotations

from dataclasses import dataclass

from mayfly_protocol.lifecycle import ToReaper


@dataclass(frozen=True, slots=True)
class Started:
    incarnation: int
    pid: int


@dataclass(frozen=True, slots=True)
class NotStarted:
    """The system would not start the process."""

    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Said:
    incarnation: int
    message: ToReaper


@dataclass(frozen=True, slots=True)
class Exited:
    """An incarnation's process is gone; ``status`` as ``subprocess.Popen.returncode`` has it,
    ``stderr`` the last lines that it wrote."""

    incarnation: int
    status: int
    stderr: str = ""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class RecycleAsked:
    """Somebody wants another worker: a fresh one for one that serves, and at once where the slot
    is in back-off or has failed."""


@dataclass(frozen=True, slots=True)
class StopAsked:
    """The node stops; ``hurry`` is for those who asked before."""

    hurry: bool = False


Event = Started | NotStarted | Said | Exited | Tick | RecycleAsked | StopAsked
