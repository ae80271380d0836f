"""Why a worker ended: one kind, one scope, and the first cause.

A worker that can still speak names its fault itself, and the reaper names what it saw from outside
(``wedged``, ``silent``); both come before the process is gone and are not overruled by how it then
died. For all others the exit status is the truth, and the end of stderr only explains it:
:func:`mayfly_protocol.faults.classify_exit` says of which kind that is.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

from mayfly_protocol.faults import KINDS, classify_exit
from mayfly_protocol.lifecycle import Bye, Cause, Exit, Fault, Scope

TELLING = ("Fatal Python error: ", "Timeout (", "libc++abi: terminating", "  what():")
"""How the line begins that says what happened, where the end of stderr is somebody's stack."""

INNOCENT = frozenset({"killed", "left"})
"""Somebody's hand, or a worker's own good order: not held against a slot whose workers serve."""

PAUSED = frozenset({"metal_timeout", "metal_out_of_memory"})
"""The GPU, or its memory, is busy: even after a first loss the next worker is not started at
once."""

OUT_OF_MEMORY = frozenset(
    {"allocation_failed", "cuda_out_of_memory", "metal_out_of_memory", "killed_by_system"}
)


@dataclass(frozen=True, slots=True)
class Verdict:
    kind: str
    scope: Scope
    first: Cause
    later: tuple[Cause, ...] = ()

    @property
    def text(self) -> str:
        """In one line, for people."""
        return f"{self.kind}: {self.first.text}"

    @property
    def blames_requests(self) -> bool:
        """Whether those in the forward pass that died may have done it."""
        return self.kind not in KINDS or KINDS[self.kind].strike == "suspects"


def of_fault(fault: Fault) -> Verdict:
    """What a worker says of itself, taken at its word."""
    return Verdict(fault.kind, fault.scope, fault.first, fault.later)


def of_exit(
    status: int, stderr: str, bye: Bye | None, *, sent_by_us: bool = False, starved: str = ""
) -> Verdict:
    """What an exit means by itself.

    Args:
        status: as ``subprocess.Popen.returncode`` has it, a signal's number negated.
        stderr: the last lines that the process wrote.
        bye: what it said of its leaving, if it did.
        sent_by_us: whether the signal may have been the reaper's.
        starved: what shows that the system was short of memory.
    """
    found = classify_exit(status, stderr, sent_by_us=sent_by_us, memory_pressure=bool(starved))
    how = describe_status(status)
    if found.kind in ("killed", "killed_by_system"):
        how = f"{describe_status(status).removeprefix('killed by ')} from outside"
    if found.kind == "killed_by_system":
        told = starved
    elif bye is not None and bye.reason:
        told = bye.reason
    else:
        told = telling_line(stderr, found.signature)
    return Verdict(found.kind, found.scope, Cause("Exit", f"{how}: {told}" if told else how))


def describe_status(status: int) -> str:
    """For people: ``killed by SIGSEGV``, ``exit status 70 (poisoned)``."""
    if status < 0:
        try:
            return f"killed by {signal.Signals(-status).name}"
        except ValueError:  # a real-time signal
            return f"killed by signal {-status}"
    try:
        return f"exit status {status} ({Exit(status).name.lower().replace('_', ' ')})"
    except ValueError:
        return f"exit status {status}"


def telling_line(stderr: str, signature: str = "") -> str:
    """The line of a dying process's stderr that most likely says why: the one that gave its kind
    away, if there is such a one."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    if signature:
        for line in lines:
            if signature in line:
                return line
    for line in stderr.splitlines():
        if line.startswith(TELLING):
            return line.strip()
    return lines[-1] if lines else ""
