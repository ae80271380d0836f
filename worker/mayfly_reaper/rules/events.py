"""Events: everything that can happen to a slot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mayfly_protocol.breadcrumb import Breadcrumb
from mayfly_protocol.lifecycle import ToReaper

RecycleCause = Literal["asked", "inferences", "age", "memory"]
DeferCause = Literal["orphans", "pause", "memory", "memory_lost"]


@dataclass(frozen=True, slots=True)
class ProcessStarted:
    """The process of an incarnation runs."""

    incarnation: int
    pid: int


@dataclass(frozen=True, slots=True)
class SpawnFailed:
    """The system refused to start the process of an incarnation."""

    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """A message of an incarnation has arrived."""

    incarnation: int
    message: ToReaper


@dataclass(frozen=True, slots=True)
class ProcessEnded:
    """The process of an incarnation is gone. ``ProcessExited`` follows: to read what a process has
    left takes longer than to publish that it no longer serves."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class ProcessExited:
    """The exit status of an incarnation's process, and what the process has left behind.

    ``status`` is as in ``subprocess.Popen.returncode``; ``stderr`` holds the last lines that the
    process wrote, ``crumb`` its breadcrumb about the last forward pass. ``oom_evidence`` says what
    shows that the system was short of memory; it is empty where nothing does.
    """

    incarnation: int
    status: int
    stderr: str = ""
    crumb: Breadcrumb | None = None
    oom_evidence: str = ""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class SpawnAllowed:
    """The machine has room for the worker that the slot wants."""


@dataclass(frozen=True, slots=True)
class SpawnDeferred:
    """The machine is in no state to start a worker before ``until``. ``reason`` is for people."""

    until: float
    reason: str
    cause: DeferCause = "pause"


@dataclass(frozen=True, slots=True)
class RecycleRequested:
    """The slot is to get a new worker.

    A worker that serves is replaced: its successor is loaded beside it (``surge``) or after it has
    left. A slot that is in back-off or has failed gets a worker at once. ``reason`` is for people.
    """

    surge: bool = False
    reason: str = ""
    cause: RecycleCause = "asked"


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The node stops. ``hurry`` ends workers at once. Running requests may go on for ``grace_s``
    seconds; None stands for ``Budgets.stop_s``."""

    hurry: bool = False
    grace_s: float | None = None


WorkerEvent = ProcessStarted | SpawnFailed | MessageReceived | ProcessEnded | ProcessExited
"""An event of one incarnation."""

Event = WorkerEvent | Tick | SpawnAllowed | SpawnDeferred | RecycleRequested | StopRequested
