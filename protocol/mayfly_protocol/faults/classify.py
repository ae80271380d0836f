"""From an error to its kind.

Three things can be had of a fault, and each has its function::

    a message                    classify_text
    an exception with its chain  classify_exception    the earliest that names something decides
    a dead process               classify_exit         its status decides, its stderr explains

None of them raises, whatever it is given. What nothing in the table matches is ``unknown``, with
worker scope.

The fault table: every kind of fault in the order in which texts are tried against them.

Exceptions in the order in which they happened.

Python hands over the last exception of a chain, and what led to it hangs behind::

    raised last  --__cause__, __context__-->  ...  -->  raised first
        |
        '--exceptions (of a group)-->  raised before the group was made

The first is the truth about a fault. What cleanup raises afterwards is kept, but apart: it must
never stand where the first belongs.

Finding the table's signatures in texts.

::

    log line          ... cudaGraphLaunch(graph, stream) failed: an illegal memory access was ...
    cuda_sticky                                         '-----------------------------'
    cuda_graph_launch     '-----------------------------------'
    cuda_other            '-------------------------------------'

Signatures that overlap or touch are about one error, and the first of the table tells most of it.
Signatures apart from each other are different errors, and the earlier is the cause.
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
"""By name: all that a verdict, an autopsy or a roster can say."""

MESSAGES: tuple[Kind, ...] = (*METAL, STREAM_THREAD, *CUDA, *ENGINE)
"""Those that the text of an error tells."""


MAX_TEXT = 4_000
"""Characters of one message."""
MAX_TRACEBACK = 16_000
"""Characters of one traceback."""
MAX_LATER = 15


def chain(error: BaseException) -> list[BaseException]:
    """All exceptions that ``error`` holds on to and ``error`` itself, the earliest first.

    A context that was suppressed (``raise ... from None``) counts as well, for it happened; but not
    one without a message, such as the StopIteration of an iterator that was asked for its first.
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
            pending += [(earlier, False) for earlier in reversed(_before(current))]
    return ordered


def causes(error: BaseException) -> tuple[Cause, tuple[Cause, ...]]:
    """The first cause, and those that came later in their order (the last ``MAX_LATER``).

    Each one's traceback is its own, without those of the others.
    """
    first, *later = chain(error)
    return _cause_of(first), tuple(_cause_of(each) for each in later[-MAX_LATER:])


def message(error: BaseException) -> str:
    """An exception's text, even where its ``__str__`` is broken."""
    try:
        return str(error)
    except Exception as broken:
        return f"<no text: its __str__ raised {type(broken).__name__}>"


def _before(error: BaseException) -> list[BaseException]:
    members = list(error.exceptions) if isinstance(error, BaseExceptionGroup) else []
    context = error.__context__
    if context is not None and error.__suppress_context__ and not message(context):
        context = None
    direct = [each for each in (error.__cause__, context) if each is not None]
    return direct + members


def _cause_of(error: BaseException) -> Cause:
    """Its text is its type where it has no message: what is shown alone must not be empty."""
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
    """A traceback's end holds the innermost frames and the message, and its head where it began."""
    if len(text) <= MAX_TRACEBACK:
        return text
    mark = "\n  … shortened …\n"
    head = MAX_TRACEBACK // 4
    tail = MAX_TRACEBACK - head - len(mark)
    return text[:head] + mark + text[-tail:]


@dataclass(frozen=True, slots=True)
class Found:
    """``text``, at ``start``, matched the kind's signature. It lies in the line that begins at
    ``line_start``."""

    kind: Kind
    text: str
    start: int
    line_start: int

    @property
    def end(self) -> int:
        return self.start + len(self.text)


def find_all(text: str, kinds: Iterable[Kind]) -> list[Found]:
    """The first error that each line of ``text`` names, from its first line to its last.

    ``cxx_abort`` counts only where a line names nothing else: it says no more than that the rest
    of the line was not caught.

    Linear in the text's length: no signature looks further than a few hundred characters.
    """
    lines: dict[int, list[Found]] = {}
    for kind in kinds:
        for found in _matches(kind, text):
            lines.setdefault(found.line_start, []).append(found)
    return [_first(lines[start]) for start in sorted(lines)]


def _matches(kind: Kind, text: str) -> Iterator[Found]:
    if kind.signature is None:
        return
    line_start = 0
    for match in kind.signature.finditer(text):
        # Searched from the line before, not from the text's start: one line may hold thousands.
        line_start = max(line_start, text.rfind("\n", line_start, match.start()) + 1)
        yield Found(kind, match[0], match.start(), line_start)


def _first(found: list[Found]) -> Found:
    """Of one line's, which come in the table's order."""
    named = [each for each in found if each.kind is not CXX_ABORT] or found
    start = min(each.start for each in named)
    end = max(each.end for each in named if each.start == start)
    return next(each for each in named if each.start <= end)


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
    blame: Blame


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
    return Verdict(found.kind.name, scope, found.text, found.kind.blame)


def _of_found(found: Found) -> Verdict:
    return _of(found.kind.name, found.text)


def _of(name: str, signature: str = "") -> Verdict:
    kind = KINDS[name]
    return Verdict(name, kind.scope, signature, kind.blame)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
