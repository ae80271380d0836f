"""Exit cause: the verdict on a worker that has ended, as one kind of fault, one scope (how much is
lost) and the first cause.

A worker that can still send messages names its fault itself, and the reaper names faults that it
saw from outside (``wedged``: no progress, ``silent``: no messages); both verdicts come before the
process is gone and are not overruled by its exit. For all other workers the exit status decides,
and the end of stderr only explains it: :func:`mayfly_protocol.faults.classify_exit` finds the kind.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

from mayfly_protocol.faults import KINDS, classify_exit
from mayfly_protocol.lifecycle import Bye, Cause, Exit, Fault, Scope

CAUSE_LINE_PREFIXES = (
    "Fatal Python error: ",
    "Timeout (",
    "libc++abi: terminating",
    "  what():",
)
"""Beginnings of the line of stderr that names the cause, where stderr ends with a stack trace."""

NOT_HELD_AGAINST_SLOT = frozenset({"killed", "left"})
"""Kinds of loss that do not lengthen the pause before the next worker, if the lost worker has
served: somebody's SIGKILL, or an orderly exit of the worker's own."""

GPU_IS_BUSY = frozenset({"metal_timeout", "metal_out_of_memory"})
"""Kinds of fault after which the GPU, or its memory, may still be busy: even after a first loss the
next worker is not started at once."""

OUT_OF_MEMORY = frozenset(
    {"allocation_failed", "cuda_out_of_memory", "metal_out_of_memory", "killed_by_system"}
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Cause of a worker's loss: the kind of fault, its scope (how much is lost), the exception that
    came first, and the exceptions that followed."""

    kind: str
    scope: Scope
    first: Cause
    later: tuple[Cause, ...] = ()

    @property
    def text(self) -> str:
        """One line for people: the kind of fault and the text of its first cause."""
        return f"{self.kind}: {self.first.text}"

    @property
    def blames_requests(self) -> bool:
        """True if a request in the worker's last forward pass may have caused the loss."""
        return self.kind not in KINDS or KINDS[self.kind].blame == "suspects"


def verdict_of_fault(fault: Fault) -> Verdict:
    """Returns the verdict that follows from a worker's own report of its fault."""
    return Verdict(fault.kind, fault.scope, fault.first, fault.later)


def verdict_of_exit(
    status: int,
    stderr: str,
    bye: Bye | None,
    *,
    sent_by_us: bool = False,
    oom_evidence: str = "",
) -> Verdict:
    """Returns the verdict on a worker that reported no fault, from the end of its process.

    Args:
        status: the exit status as in ``subprocess.Popen.returncode``, a signal's number negated.
        stderr: the last lines that the process wrote.
        bye: the worker's announcement that it leaves, if it sent one.
        sent_by_us: True if the signal may have been the reaper's.
        oom_evidence: evidence that the system was short of memory; empty if there is none.
    """
    found = classify_exit(status, stderr, sent_by_us=sent_by_us, memory_pressure=bool(oom_evidence))
    text = describe_status(status)
    if found.kind in ("killed", "killed_by_system"):
        text = f"{text.removeprefix('killed by ')} from outside"
    if found.kind == "killed_by_system":
        reason = oom_evidence
    elif bye is not None and bye.reason:
        reason = bye.reason
    else:
        reason = cause_line(stderr, found.signature)
    return Verdict(found.kind, found.scope, Cause("Exit", f"{text}: {reason}" if reason else text))


def describe_status(status: int) -> str:
    """Returns an exit status in words: ``killed by SIGSEGV``, ``exit status 70 (poisoned)``."""
    if status < 0:
        try:
            return f"killed by {signal.Signals(-status).name}"
        except ValueError:  # a real-time signal
            return f"killed by signal {-status}"
    try:
        return f"exit status {status} ({Exit(status).name.lower().replace('_', ' ')})"
    except ValueError:
        return f"exit status {status}"


def cause_line(stderr: str, signature: str = "") -> str:
    """Returns the line of a dead process's stderr that most likely names the cause: the line with
    ``signature``, the text by which the kind of fault was recognised, if there is such a line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    if signature:
        for line in lines:
            if signature in line:
                return line
    for line in stderr.splitlines():
        if line.startswith(CAUSE_LINE_PREFIXES):
            return line.strip()
    return lines[-1] if lines else ""
