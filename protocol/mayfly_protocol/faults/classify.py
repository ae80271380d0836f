"""From an error to its kind.

Three things can be had of a fault, and each has its function::

    a message                    classify_text
    an exception with its chain  classify_exception    the earliest that names something decides
    a dead process               classify_exit         its status decides, its stderr explains

None of them raises, whatever it is given. What nothing in the table matches is ``unknown``, with
worker scope.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace

from mayfly_protocol.faults.causes import chain, message
from mayfly_protocol.faults.ends import ENDS
from mayfly_protocol.faults.engine import CXX_ABORT
from mayfly_protocol.faults.kind import Strike
from mayfly_protocol.faults.search import Found, find_all
from mayfly_protocol.faults.table import KINDS, MESSAGES
from mayfly_protocol.lifecycle import Exit, Scope

CRASHES = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGTRAP})
BY_HAND = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR2})
"""Signals that the system does not send by itself."""

SURVIVED: frozenset[Scope] = frozenset({"request", "batch", "recycle"})
"""Scopes that leave the process alive."""

OUT_OF_CXX = (RuntimeError, ValueError, MemoryError)
"""What MLX's exceptions arrive as in Python."""

VAGUE = {CXX_ABORT.name: 1, "unknown": 2}
"""Kinds that say less than any other, and how much less."""

LEFT = {
    Exit.BYE: "left",
    Exit.CONFIGURATION: "configuration",
    Exit.LOAD_FAILED: "load_failed",
    Exit.ORPHANED: "orphaned",
    Exit.RECYCLED: "recycled",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """``signature`` is the text that gave the kind away, or the signal's name; empty for none."""

    kind: str
    scope: Scope
    signature: str
    strike: Strike


def classify_text(text: str) -> Verdict:
    """The kind of an error by its message, which may have many lines: the first that names
    something decides, and only if none does, that a C++ exception went uncaught."""
    found = find_all(text, MESSAGES) or find_all(text, ENDS)
    return _of_found(min(found, key=_is_abort)) if found else _of("unknown")


def classify_exception(error: BaseException) -> Verdict:
    """The kind of an error by the earliest exception of its chain that names one.

    What was raised later, while others were handled, cannot change what an earlier one says; an
    earlier one that says nothing (a KeyError that was being handled) does not hide it. But where
    the unnamed one can have come out of MLX, the process does not survive, whatever came later.
    """
    errors = chain(error)
    verdicts = [classify_text(message(each)) for each in errors]
    verdict = min(verdicts, key=lambda verdict: VAGUE.get(verdict.kind, 0))
    before = errors[: verdicts.index(verdict)]
    if verdict.scope in SURVIVED and any(isinstance(each, OUT_OF_CXX) for each in before):
        return replace(verdict, scope="worker")
    return verdict


def classify_exit(
    status: int, stderr: str, *, sent_by_us: bool = False, memory_pressure: bool = False
) -> Verdict:
    """The kind of a process's death.

    Args:
        status: as ``subprocess.Popen.returncode`` has it, a signal's number negated.
        stderr: the last lines that it wrote. They explain an abort, a failed load and an exit of
            Python's own; no text overrules what the status says by itself.
        sent_by_us: whether the signal was the reaper's. A reaper that sent one knows why, and its
            reason goes before this verdict, which can only be ``wedged``: a worker that had to be
            made to leave.
        memory_pressure: whether the system was short of memory as it died (an OOM kill in the
            cgroup, jetsam's log, a footprint close to the limit).
    """
    if status < 0:
        return _of_signal(-status, stderr, sent_by_us, memory_pressure)
    match status:
        case Exit.BYE | Exit.ORPHANED | Exit.RECYCLED:
            return _of(LEFT[Exit(status)])
        case Exit.CONFIGURATION:
            named = _last_words(stderr)
            return named if named and named.scope == "model" else _of("configuration")
        case Exit.LOAD_FAILED:
            return _last_words(stderr) or _of("load_failed")
        case 1 if watchdog := find_all(stderr, [KINDS["wedged"]]):
            return _of_found(watchdog[0])
        case _:
            return _last_words(stderr) or _of("unknown")


def _of_signal(number: int, stderr: str, sent_by_us: bool, memory_pressure: bool) -> Verdict:
    name = _signal_name(number)
    if number == signal.SIGABRT:
        return _last_words(stderr) or _of("aborted", name)
    if number in CRASHES:
        return _of("crashed", name)
    if number != signal.SIGKILL and number not in BY_HAND:
        return _of("unknown", name)
    if sent_by_us:
        return _of("wedged", name)
    if number == signal.SIGKILL and memory_pressure:
        return _of("killed_by_system", name)
    return _of("killed", name)


def _last_words(stderr: str) -> Verdict | None:
    """What the end of a dead process's stderr names as the cause.

    An uncaught C++ exception is the death itself, so what it says goes before all lines above it,
    unless it only followed from one of them. Elsewhere a fault that ends a process goes before
    those that it had survived, and the earlier before the later.
    """
    uncaught = [found.line_start for found in find_all(stderr, [CXX_ABORT])]
    if uncaught:
        last = _cause(find_all(stderr[uncaught[-1] :], MESSAGES))
        if not last.kind.follows and not _is_abort(last):
            return _fatal(last)
    found = find_all(stderr, MESSAGES)
    return _fatal(_cause(found)) if found else None


def _cause(found: list[Found]) -> Found:
    return min(
        found,
        key=lambda each: (_is_abort(each), each.kind.follows, each.kind.scope in SURVIVED),
    )


def _is_abort(found: Found) -> bool:
    return found.kind is CXX_ABORT


def _fatal(found: Found) -> Verdict:
    """A fault that might have been survived, but was not."""
    scope = "worker" if found.kind.scope in SURVIVED else found.kind.scope
    return Verdict(found.kind.name, scope, found.text, found.kind.strike)


def _of_found(found: Found) -> Verdict:
    return _of(found.kind.name, found.text)


def _of(name: str, signature: str = "") -> Verdict:
    kind = KINDS[name]
    return Verdict(name, kind.scope, signature, kind.strike)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
