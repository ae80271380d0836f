"""What can happen to a slot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mayfly_protocol.breadcrumb import Breadcrumb
from mayfly_protocol.lifecycle import ToReaper

RecycleCause = Literal["asked", "inferences", "age", "memory"]
HoldCause = Literal["orphans", "pause", "memory", "memory_lost"]


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
class Ended:
    """An incarnation's process is gone. ``Exited`` follows: to find out how it went takes longer
    than to tell everyone that it serves no more."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class Exited:
    """How an incarnation's process ended and what it has left: ``status`` as
    ``subprocess.Popen.returncode`` has it, ``stderr`` the last lines that it wrote, ``crumb`` what
    its last forward pass was about. ``starved`` is what shows that the system was short of memory,
    empty where nothing does."""

    incarnation: int
    status: int
    stderr: str = ""
    crumb: Breadcrumb | None = None
    starved: str = ""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Granted:
    """The machine has room for the worker that the slot wants."""


@dataclass(frozen=True, slots=True)
class Held:
    """The machine is in no state to start a worker. ``reason`` is for people."""

    until: float
    reason: str
    cause: HoldCause = "pause"


@dataclass(frozen=True, slots=True)
class RecycleAsked:
    """Another worker is wanted: a fresh one for one that serves, loaded beside it (``surge``) or
    in its place, and at once where the slot is in back-off or has failed. ``reason`` is for
    people."""

    surge: bool = False
    reason: str = ""
    cause: RecycleCause = "asked"


@dataclass(frozen=True, slots=True)
class StopAsked:
    """The node stops; ``hurry`` is for those who asked before. What runs may go on for
    ``grace_s``; by default for as long as the budgets say."""

    hurry: bool = False
    grace_s: float | None = None


OfLife = Started | NotStarted | Said | Ended | Exited
"""What is about one incarnation."""

Event = OfLife | Tick | Granted | Held | RecycleAsked | StopAsked
