"""Keeping what is known of lost workers: in the autopsies' file, for good, and in rosters, the last
of them. A disk that is full costs the file its record and nobody else anything.

What is told and kept of exceptions and stderr is not meant to hold a prompt, but Python quotes
the values that it complains of: quotations long enough to be somebody's text are cut out.

Who may have killed a worker, and telling everyone that it is lost.

What is kept of every worker that was lost: one JSON object a line in ``autopsies.jsonl``.

``id``              names the record: the reaper's epoch and the incarnation
``time``            when it was written, UTC
``slot``, ``model``, ``incarnation``, ``pid``
``kind``, ``scope`` what it was (:mod:`mayfly_reaper.rules.exit_cause`)
``first_cause``     the exception that came first, with its traceback where there is one
``later``           what only followed from it
``survived``        faults before it that the worker had outlived, and how long before the end
``exit_status``     a signal's number negated; null if the process never started
``stderr``          its last lines
``state``           the slot's before the verdict; ``phase`` the engine's, by its last beat
``inferences``, ``running``, ``waiting``, ``memory``   by its last beat
``breadcrumb``      what its last forward pass was about; null where it left none
``requests``        in flight, where the worker could still name them
``suspects``, ``marked``   which of them may have done it (:mod:`mayfly_reaper.crash_log`)
``lived_s``         since it was spawned
``done``            what the reaper did then

Nothing in it is meant to hold a prompt (:mod:`mayfly_reaper.crash_log`).

The last autopsies in short, as rosters tell them: with ages, for there are no clocks on the
wire.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from pydantic import TypeAdapter

from mayfly_protocol.breadcrumb import Breadcrumb
from mayfly_protocol.common.throttle import LogThrottle
from mayfly_protocol.lifecycle import Beat, Cause
from mayfly_protocol.roster import Autopsy, Loss
from mayfly_reaper.observer import About, SafeObserver
from mayfly_reaper.rules.actions import RecordLoss
from mayfly_reaper.rules.exit_cause import Verdict
from mayfly_reaper.rules.incarnation import Incarnation

LINE = 1000
"""Characters."""
QUOTED = 60

_QUOTATION = re.compile(r"""(?<!\w)(?<!File )(['"])(.*?)(?:\1(?!\w)|$)""")


def redacted(text: str) -> str:
    """Without quotations long enough to be somebody's text, and without the ends of lines that are
    too long."""
    return "\n".join(_QUOTATION.sub(_shortened, line[:LINE]) for line in text.split("\n"))


def _shortened(quotation: re.Match[str]) -> str:
    length = len(quotation[2])
    return quotation[0] if length <= QUOTED else f"'({length} characters)'"


def suspicion(
    worker: Incarnation, verdict: Verdict, crumb: Breadcrumb | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The suspects and the marked.

    What the worker wrote before its last forward pass goes before what it said afterwards. Nobody
    is suspected where the fault is surely not a request's: somebody's SIGKILL, another process's
    reset of the GPU.
    """
    if not verdict.blames_requests:
        return (), ()
    if crumb is not None:
        return crumb.suspects, crumb.marked
    return (worker.fault.suspects if worker.fault is not None else ()), ()


def loss_of(slot: str, worker: Incarnation, verdict: Verdict, crumb: Breadcrumb | None) -> Loss:
    """What a roster says of a worker that has just been lost."""
    suspects, marked = suspicion(worker, verdict, crumb)
    return Loss(
        slot=slot,
        incarnation=worker.number,
        kind=verdict.kind,
        scope=verdict.scope,
        first_cause=redacted(verdict.first.text),
        age_s=0.0,
        suspects=suspects,
        marked=marked,
    )


MOST_BYTES = 4 << 20
"""Of one file; then it is put aside ..."""
KEPT_FILES = 3
"""... and so many of those are kept."""

STDERR_LINES = 200


def autopsy(
    record: RecordLoss, *, slot: str, model: str, epoch: str, time: datetime, now: float
) -> dict[str, Any]:
    """The record of a loss as it is written. ``now`` is of the reaper's clock, ``time`` the
    wall's, for people."""
    worker, verdict, exited = record.worker, record.verdict, record.worker.exit
    beat = worker.beat or Beat(phase="loading", progress=0)
    crumb = exited.crumb if exited is not None else None
    suspects, marked = suspicion(worker, verdict, crumb)
    return {
        "id": f"{epoch}-{worker.number}",
        "time": time.isoformat(timespec="milliseconds"),
        "slot": slot,
        "model": model,
        "incarnation": worker.number,
        "pid": worker.pid,
        "kind": verdict.kind,
        "scope": verdict.scope,
        "first_cause": _cause(verdict.first),
        "later": [_cause(cause) for cause in verdict.later],
        "survived": [
            {
                "kind": each.fault.kind,
                "scope": each.fault.scope,
                "text": redacted(each.fault.first.text),
                "ago_s": round(now - each.at, 3),
            }
            for each in worker.survived
        ],
        "exit_status": exited.status if exited is not None else None,
        "stderr": _lines(exited.stderr) if exited is not None else [],
        "state": worker.state_before_gone,
        "phase": beat.phase,
        "inferences": beat.inferences,
        "running": beat.running,
        "waiting": beat.waiting,
        "memory": asdict(beat.memory),
        "breadcrumb": asdict(crumb) if crumb is not None else None,
        "requests": list(worker.fault.requests) if worker.fault is not None else [],
        "suspects": list(suspects),
        "marked": list(marked),
        "lived_s": round(now - worker.spawned_at, 3),
        "done": record.done,
    }


def append(path: Path, record: dict[str, Any]) -> None:
    """Adds one line, to a new file if the old one is full. Raises OSError (a full disk, say): the
    caller goes on without it."""
    text = json.dumps(record, ensure_ascii=False)
    line = text.encode(errors="backslashreplace") + b"\n"  # names of files may be no UTF-8
    size = path.stat().st_size if path.exists() else 0
    if size and size + len(line) > MOST_BYTES:
        _rotate(path)
        size = 0
    with path.open("ab+") as file:
        if size:
            file.seek(-1, 2)
            if file.read(1) != b"\n":  # a line that was cut short must not take this one with it
                line = b"\n" + line
        file.write(line)


def records(path: Path) -> Iterator[dict[str, Any]]:
    """All that is kept, the oldest first. Lines that were cut short are left out."""
    for number in range(KEPT_FILES, -1, -1):
        file = _older(path, number)
        if not file.exists():
            continue
        for line in file.read_text(encoding="utf-8", errors="replace").split("\n"):
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                yield record


def _cause(cause: Cause) -> dict[str, str]:
    return {
        "type": cause.type,
        "text": redacted(cause.text),
        "traceback": redacted(cause.traceback),
    }


def _lines(stderr: str) -> list[str]:
    return [redacted(line) for line in stderr.splitlines()[-STDERR_LINES:]]


def _older(path: Path, number: int) -> Path:
    return path.with_suffix(f".{number}{path.suffix}") if number else path


def _rotate(path: Path) -> None:
    for number in range(KEPT_FILES, 0, -1):
        younger = _older(path, number - 1)
        if younger.exists():
            younger.replace(_older(path, number))


KEPT = 8
"""Of the last ones of a node."""
CAUSE = 300
"""Characters."""

_AUTOPSY = TypeAdapter(Autopsy)


def brief(record: dict[str, Any], age_s: float = 0.0) -> Autopsy:
    """What a roster says of a record. Raises KeyError, TypeError or ValueError for one that is not
    whole, or not of the types that a roster may have: front ends would refuse all of the roster."""
    cause = first_line(str(record["first_cause"]["text"]))
    return _AUTOPSY.validate_python({**record, "first_cause": cause, "age_s": age_s})


def kept(path: Path, now: datetime) -> Iterator[Autopsy]:
    """The last records in a file, the oldest first. Those that another version wrote differently
    are left out. Raises OSError where there is a file that cannot be read."""
    for record in deque(records(path), maxlen=KEPT):
        try:
            written = datetime.fromisoformat(record["time"])
            found = brief(record, max(0.0, (now - written).total_seconds()))
        except (KeyError, TypeError, ValueError):
            continue
        yield found


def first_line(text: str) -> str:
    """One line is enough for a list."""
    return text.partition("\n")[0][:CAUSE]


class LossPublisher(Protocol):
    """Publishes losses to front ends; the roster publisher does."""

    def record(self, autopsy: Autopsy, now: float) -> None: ...


class CrashLog:
    """``epoch`` is the reaper's; what reapers before it wrote is told on at once."""

    def __init__(
        self, path: Path, epoch: str, observer: SafeObserver, bulletin: LossPublisher
    ) -> None:
        self._path = path
        self._epoch = epoch
        self._observer = observer
        self._complain = LogThrottle(observer.note, quiet_s=math.inf)
        self._bulletin = bulletin
        try:
            for each in kept(path, datetime.now(UTC)):
                bulletin.record(each, time.monotonic())
        except OSError as error:
            self._complain(f"autopsies cannot be read: {error}")

    def add(self, slot: str, model: str, record: RecordLoss) -> None:
        worker = record.worker
        lost = f"{slot}: lost worker {worker.number} (pid {worker.pid}): {record.verdict.text}"
        self._observer.note(f"{lost}; {record.done}", About(slot, worker.number, bad=True))
        written = autopsy(
            record,
            slot=slot,
            model=model,
            epoch=self._epoch,
            time=datetime.now(UTC),
            now=time.monotonic(),
        )
        try:
            append(self._path, written)
        except OSError as error:
            self._complain(f"autopsies cannot be written: {error}")
        self._bulletin.record(brief(written), time.monotonic())
