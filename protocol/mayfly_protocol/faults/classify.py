"""Classification of an error, an exception or a dead process as a kind of the fault table.

============================  ======================  ==========================================
given                         function                decided by
============================  ======================  ==========================================
a message                     classify_text           the first signature in it
an exception with its chain   classify_exception      the earliest exception that names a kind
a dead process                classify_exit           its exit status; its stderr explains it
============================  ======================  ==========================================

None of these functions raises, whatever it is given. An error that matches no signature (regular
expression) of the fault table is of the kind ``unknown``, with worker scope (the worker is lost).

Signatures are searched in texts line by line::

    log line          ... cudaGraphLaunch(graph, stream) failed: an illegal memory access was ...
    cuda_sticky                                         '-----------------------------'
    cuda_graph_launch     '-----------------------------------'
    cuda_other            '-------------------------------------'

Signatures that overlap or touch belong to one error, and the signature that comes first in the
table says most about the error. Signatures apart from each other belong to different errors, and
the earlier error is the cause.

Exceptions are searched in the order in which they were raised. Python hands over the last exception
of a chain, and the earlier exceptions hang behind it::

    raised last  --__cause__, __context__-->  ...  -->  raised first
        |
        '--exceptions (of a group)-->  raised before the group was made

The exception raised first is the cause of a fault. Exceptions that cleanup raises afterwards are
kept apart from the cause, so that they never take its place.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from mayfly_protocol.faults.cuda import CUDA
from mayfly_protocol.faults.engine import CXX_ABORT, ENGINE, STREAM_THREAD
from mayfly_protocol.faults.exits import ENDS, LEAVINGS
from mayfly_protocol.faults.kinds import Blame, Kind
from mayfly_protocol.faults.metal import METAL
from mayfly_protocol.lifecycle import Cause, Exit, Scope

TABLE: tuple[Kind, ...] = (*METAL, STREAM_THREAD, *CUDA, *ENGINE, *ENDS)

KINDS: dict[str, Kind] = {kind.name: kind for kind in (*TABLE, *LEAVINGS)}
"""All kinds of fault by name, including kinds of a worker's exit for which the engine is not to
blame."""

MESSAGES: tuple[Kind, ...] = (*METAL, STREAM_THREAD, *CUDA, *ENGINE)
"""Kinds of fault that are recognised by the text of an error."""

CRASH_SIGNALS = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGTRAP})
SENT_SIGNALS = frozenset(
    {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR2}
)
"""Signals that people and programs send to a process, and the kernel does not."""

SURVIVED_SCOPES: frozenset[Scope] = frozenset({"request", "batch", "recycle"})
"""Scopes (extents of damage) of faults that leave the worker's process alive."""

MLX_EXCEPTIONS = (RuntimeError, ValueError, MemoryError)
"""Python types of MLX's exceptions."""

VAGUENESS = {CXX_ABORT.name: 1, "unknown": 2}
"""Kinds of fault that say less about the cause than all other kinds, each with a number that is
higher the less the kind says."""

KIND_OF_EXIT = {
    Exit.BYE: "left",
    Exit.CONFIGURATION: "configuration",
    Exit.LOAD_FAILED: "load_failed",
    Exit.ORPHANED: "orphaned",
    Exit.RECYCLED: "recycled",
}

MAX_TEXT = 4_000
"""Largest number of characters of an exception's message that are kept."""
MAX_TRACEBACK = 16_000
"""Largest number of characters of an exception's traceback that are kept."""
MAX_LATER = 15


@dataclass(frozen=True, slots=True)
class Classification:
    """A kind of fault with its scope (how much is lost) and blame (whether requests are suspected
    of having caused the fault). ``signature`` is the text by which the fault was recognised, or the
    signal's name; empty without either."""

    kind: str
    scope: Scope
    signature: str
    blame: Blame


def classify_text(text: str) -> Classification:
    """Classifies an error by its message, which may have many lines. The first line that names a
    kind of fault decides; an uncaught C++ exception (``cxx_abort``) counts only if no line names
    another kind."""
    found = find_signatures(text, MESSAGES) or find_signatures(text, ENDS)
    return _of_match(min(found, key=_is_abort)) if found else _of("unknown")


def classify_exception(error: BaseException) -> Classification:
    """Classifies an exception by the earliest exception of its chain that names a kind of fault.

    Exceptions raised later, while others were handled, change nothing. An earlier exception that
    names no kind (a KeyError that was being handled) is passed over; but if MLX can have raised it,
    the scope becomes ``worker``: the process does not survive, whatever was raised later.
    """
    errors = chain(error)
    classified = [classify_text(message(each)) for each in errors]
    chosen = min(classified, key=lambda each: VAGUENESS.get(each.kind, 0))
    before = errors[: classified.index(chosen)]
    if chosen.scope in SURVIVED_SCOPES and any(isinstance(each, MLX_EXCEPTIONS) for each in before):
        return replace(chosen, scope="worker")
    return chosen


def classify_exit(
    status: int, stderr: str, *, sent_by_us: bool = False, memory_pressure: bool = False
) -> Classification:
    """Classifies the end of a worker's process as a kind of fault.

    Args:
        status: the exit status as in ``subprocess.Popen.returncode``, a signal's number negated.
        stderr: the last lines that the process wrote. They explain an abort, a failed load and an
            exit of Python's own; no text overrules a status that is clear by itself.
        sent_by_us: True if the reaper, the worker's supervisor, sent the signal. A process that
            such a signal ended is classified as ``wedged``, a worker that had to be made to leave;
            the reaper knows the true reason and uses that instead.
        memory_pressure: True if the system was short of memory when the process ended (an OOM kill
            in the cgroup, jetsam's log, a footprint close to the limit).
    """
    if status < 0:
        return _of_signal(-status, stderr, sent_by_us, memory_pressure)
    match status:
        case Exit.BYE | Exit.ORPHANED | Exit.RECYCLED:
            return _of(KIND_OF_EXIT[Exit(status)])
        case Exit.CONFIGURATION:
            named = _of_stderr(stderr)
            return named if named and named.scope == "model" else _of("configuration")
        case Exit.LOAD_FAILED:
            return _of_stderr(stderr) or _of("load_failed")
        case 1 if watchdog := find_signatures(stderr, [KINDS["wedged"]]):
            return _of_match(watchdog[0])
        case _:
            return _of_stderr(stderr) or _of("unknown")


def _of_signal(number: int, stderr: str, sent_by_us: bool, memory_pressure: bool) -> Classification:
    name = _signal_name(number)
    if number == signal.SIGABRT:
        return _of_stderr(stderr) or _of("aborted", name)
    if number in CRASH_SIGNALS:
        return _of("crashed", name)
    if number != signal.SIGKILL and number not in SENT_SIGNALS:
        return _of("unknown", name)
    if sent_by_us:
        return _of("wedged", name)
    if number == signal.SIGKILL and memory_pressure:
        return _of("killed_by_system", name)
    return _of("killed", name)


def _of_stderr(stderr: str) -> Classification | None:
    """Classifies a dead process by the end of its stderr; None if no line names a kind of fault.

    An uncaught C++ exception is what ended the process, so its text goes before all lines above it,
    unless the exception only followed from one of these lines' errors. Otherwise a fault that ends
    a process goes before faults that a process survives, and an earlier fault before a later one.
    """
    uncaught = [found.line_start for found in find_signatures(stderr, [CXX_ABORT])]
    if uncaught:
        last = _cause(find_signatures(stderr[uncaught[-1] :], MESSAGES))
        if not last.kind.follows and not _is_abort(last):
            return _fatal(last)
    found = find_signatures(stderr, MESSAGES)
    return _fatal(_cause(found)) if found else None


def _cause(found: list[SignatureMatch]) -> SignatureMatch:
    return min(
        found,
        key=lambda each: (_is_abort(each), each.kind.follows, each.kind.scope in SURVIVED_SCOPES),
    )


def _is_abort(found: SignatureMatch) -> bool:
    return found.kind is CXX_ABORT


def _fatal(found: SignatureMatch) -> Classification:
    """Classifies a fault that ended its process: the scope is at least ``worker``, even if a
    process usually survives a fault of this kind."""
    scope = "worker" if found.kind.scope in SURVIVED_SCOPES else found.kind.scope
    return Classification(found.kind.name, scope, found.text, found.kind.blame)


def _of_match(found: SignatureMatch) -> Classification:
    return _of(found.kind.name, found.text)


def _of(name: str, signature: str = "") -> Classification:
    kind = KINDS[name]
    return Classification(name, kind.scope, signature, kind.blame)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def chain(error: BaseException) -> list[BaseException]:
    """Lists an exception and all exceptions chained to it (causes, contexts and members of groups),
    the earliest first.

    A suppressed context (``raise ... from None``) counts, too, unless it has no message or is a
    StopIteration, by which a parser tells its caller the place of an error.
    """
    ordered: list[BaseException] = []
    seen: set[int] = set()
    pending = [(error, False)]
    while pending:  # not recursive: a loop that fails again and again makes long chains
        current, walked = pending.pop()
        if walked:
            ordered.append(current)
        elif id(current) not in seen:
            seen.add(id(current))
            pending.append((current, True))
            pending += [(earlier, False) for earlier in reversed(_direct_causes(current))]
    return ordered


def causes(error: BaseException) -> tuple[Cause, tuple[Cause, ...]]:
    """Returns the exception of a chain that was raised first, and the later exceptions in their
    order (at most the last 15), each with its own traceback alone."""
    first, *later = chain(error)
    return _cause_of(first), tuple(_cause_of(each) for each in later[-MAX_LATER:])


def message(error: BaseException) -> str:
    """Returns an exception's text, even if its ``__str__`` raises."""
    try:
        return str(error)
    except Exception as broken:
        return f"<no text: its __str__ raised {type(broken).__name__}>"


def _direct_causes(error: BaseException) -> list[BaseException]:
    members = list(error.exceptions) if isinstance(error, BaseExceptionGroup) else []
    context = error.__context__
    if context is not None and error.__suppress_context__:
        context = None if isinstance(context, StopIteration) or not message(context) else context
    direct = [each for each in (error.__cause__, context) if each is not None]
    return direct + members


def _cause_of(error: BaseException) -> Cause:
    """Describes one exception by its type, message and traceback, without the exceptions chained to
    it. The name of the type stands for a missing message, since the message is shown alone."""
    formatted = "".join(traceback.format_exception(error, chain=False))
    name = _type_name(error)
    return Cause(name, _shorten(message(error) or name, MAX_TEXT), _shorten_middle(formatted))


def _type_name(error: BaseException) -> str:
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else _qualified(kind)


def _qualified(kind: type[BaseException]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _shorten_middle(text: str) -> str:
    """Cuts the middle out of a long traceback: the end, which is kept, holds the innermost frames
    and the message, the head the outermost frames."""
    if len(text) <= MAX_TRACEBACK:
        return text
    mark = "\n  … shortened …\n"
    head = MAX_TRACEBACK // 4
    tail = MAX_TRACEBACK - head - len(mark)
    return text[:head] + mark + text[-tail:]


@dataclass(frozen=True, slots=True)
class SignatureMatch:
    """A place in a message or log that names a kind of fault: the kind's signature (a
    regular expression) matches ``text``, at position ``start``, in the line that begins at position
    ``line_start``."""

    kind: Kind
    text: str
    start: int
    line_start: int

    @property
    def end(self) -> int:
        return self.start + len(self.text)


def find_signatures(text: str, kinds: Iterable[Kind]) -> list[SignatureMatch]:
    """Finds the first error that each line of ``text`` names, in the order of the lines.

    An uncaught C++ exception (``cxx_abort``) counts only if its line names no other error: it says
    only that the error in the rest of the line was not caught.

    Takes time linear in the text's length: no signature is longer than a few hundred characters.
    """
    lines: dict[int, list[SignatureMatch]] = {}
    for kind in kinds:
        for found in _matches(kind, text):
            lines.setdefault(found.line_start, []).append(found)
    return [_of_line(lines[start]) for start in sorted(lines)]


def _matches(kind: Kind, text: str) -> Iterator[SignatureMatch]:
    if kind.signature is None:
        return
    line_start = 0
    for match in kind.signature.finditer(text):
        # Searched from the line before, not from the text's start: one line may hold thousands.
        line_start = max(line_start, text.rfind("\n", line_start, match.start()) + 1)
        yield SignatureMatch(kind, match[0], match.start(), line_start)


def _of_line(found: list[SignatureMatch]) -> SignatureMatch:
    """Returns the match that says most about the first error of one line. ``found`` are the line's
    signature matches in the order of the fault table, in which a kind of fault that says more comes
    earlier."""
    named = [each for each in found if each.kind is not CXX_ABORT] or found
    start = min(each.start for each in named)
    end = max(each.end for each in named if each.start == start)
    return next(each for each in named if each.start <= end)
