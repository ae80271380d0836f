"""Events: everything that can happen to a slot, a place for one worker process at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mayfly_protocol.breadcrumb import Breadcrumb
from mayfly_protocol.lifecycle import ToReaper

RecycleCause = Literal["asked", "inferences", "age", "memory"]
DeferCause = Literal["orphans", "pause", "memory", "memory_lost"]


@dataclass(frozen=True, slots=True)
class ProcessStarted:
    """The worker process with the number ``incarnation`` was started."""

    incarnation: int
    pid: int


@dataclass(frozen=True, slots=True)
class SpawnFailed:
    """The operating system refused to start the worker process with the number ``incarnation``."""

    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """A message has arrived from the worker process with the number ``incarnation``."""

    incarnation: int
    message: ToReaper


@dataclass(frozen=True, slots=True)
class ProcessEnded:
    """The worker process with the number ``incarnation`` is gone. The event ``ProcessExited``
    follows when the files that the process has left have been read: front ends are to learn sooner
    that the worker no longer serves."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class ProcessExited:
    """The exit status of the worker process with the number ``incarnation``, and what it has left
    behind.

    ``status`` is as in ``subprocess.Popen.returncode``; ``stderr`` holds the last lines that the
    process wrote, ``crumb`` its record of its last forward pass. ``oom_evidence`` is the evidence
    that the system was short of memory, empty if there is none.
    """

    incarnation: int
    status: int
    stderr: str = ""
    crumb: Breadcrumb | None = None
    oom_evidence: str = ""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: timeouts of a slot (a place for one worker process) are to be checked."""


@dataclass(frozen=True, slots=True)
class SpawnAllowed:
    """The machine has room for the worker that the slot is waiting to start."""


@dataclass(frozen=True, slots=True)
class SpawnDeferred:
    """The worker that the slot is waiting to start cannot be started before ``until``. ``reason``
    is for people."""

    until: float
    reason: str
    cause: DeferCause = "pause"


@dataclass(frozen=True, slots=True)
class RecycleRequested:
    """The slot is to replace its healthy worker (recycle).

    A worker that serves gets a successor, which is loaded beside it (``surge``) or after it has
    left. A slot that waits after a loss, or that has failed, gets a worker at once. ``reason`` is
    for people.
    """

    surge: bool = False
    reason: str = ""
    cause: RecycleCause = "asked"


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The node stops, and the slot's workers are to end; with ``hurry``, at once. Running requests
    may go on for ``grace_s`` seconds; if it is None, for the configured ``Budgets.stop_s``."""

    hurry: bool = False
    grace_s: float | None = None


WorkerEvent = ProcessStarted | SpawnFailed | MessageReceived | ProcessEnded | ProcessExited
"""An event that concerns one worker process."""

Event = WorkerEvent | Tick | SpawnAllowed | SpawnDeferred | RecycleRequested | StopRequested
