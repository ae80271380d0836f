"""Why a worker ended: one kind, one scope, and the first cause.

A worker that can still speak names its fault itself, and the reaper names what it saw from outside
(``wedged``, ``silent``); both come before the process is gone and are not overruled by how it then
died. For all others the exit status is the truth, and the end of stderr only explains it.

=================  =======  =================================================
kind               scope    ended by
=================  =======  =================================================
left               worker   exit 0 that nobody here asked for
configuration      model    exit 3
load_failed        worker   exit 4
orphaned           worker   exit 71: it saw the end of its stdin
killed             worker   a SIGKILL that the reaper did not send
aborted            worker   SIGABRT
crashed            worker   SIGSEGV, SIGBUS, SIGILL, SIGTRAP
wedged             worker   faulthandler's watchdog, or the reaper's budgets
silent             worker   the reaper's budgets
not_started        machine  the system would not start the process
unknown            worker   anything else
=================  =======  =================================================
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

from mayfly_protocol.lifecycle import Bye, Cause, Exit, Fault, Scope

CRASHES = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGTRAP})
# The first line that says what happened, where the end of stderr would be somebody's stack.
TELLING = ("Fatal Python error: ", "Timeout (", "libc++abi: terminating", "  what():")


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


def of_fault(fault: Fault) -> Verdict:
    """What a worker says of itself, taken at its word."""
    return Verdict(fault.kind, fault.scope, fault.first, fault.later)


def of_exit(status: int, stderr: str, bye: Bye | None) -> Verdict:
    """What an exit means by itself.

    Args:
        status: as ``subprocess.Popen.returncode`` has it, a signal's number negated.
        stderr: the last lines that the process wrote.
        bye: what it said of its leaving, if it did.
    """
    kind, scope = _kind_of_signal(-status) if status < 0 else _kind_of_code(status, stderr)
    told = bye.reason if bye is not None and bye.reason else telling_line(stderr)
    how = describe_status(status) if kind != "killed" else "SIGKILL from outside"
    return Verdict(kind, scope, Cause("Exit", f"{how}: {told}" if told else how))


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


def telling_line(stderr: str) -> str:
    """The line of a dying process's stderr that most likely says why."""
    lines = [line for line in stderr.splitlines() if line.strip()]
    for line in lines:
        if line.startswith(TELLING):
            return line.strip()
    return lines[-1].strip() if lines else ""


def _kind_of_signal(number: int) -> tuple[str, Scope]:
    if number == signal.SIGKILL:
        return "killed", "worker"
    if number == signal.SIGABRT:
        return "aborted", "worker"
    return ("crashed" if number in CRASHES else "unknown"), "worker"


def _kind_of_code(code: int, stderr: str) -> tuple[str, Scope]:
    match code:
        case Exit.BYE:
            return "left", "worker"
        case Exit.CONFIGURATION:
            return "configuration", "model"
        case Exit.LOAD_FAILED:
            return "load_failed", "worker"
        case Exit.ORPHANED:
            return "orphaned", "worker"
        case 1 if "Timeout (" in stderr:
            return "wedged", "worker"
        case _:
            return "unknown", "worker"
