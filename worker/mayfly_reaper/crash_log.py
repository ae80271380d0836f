"""Crash log: one record (autopsy) of every lost worker, in a file that is kept, and published to
front ends in the node's rosters while the record is one of the latest.

The file ``autopsies.jsonl`` has one JSON object a line:

``id``              the record's name: the reaper's epoch and the worker's process number
``time``            time of writing the record, UTC
``slot``, ``model``, ``incarnation`` (process number), ``pid``   of the worker
``kind``, ``scope`` the verdict (:mod:`mayfly_reaper.rules.exit_cause`)
``first_cause``     the exception that came first, with its traceback where there is one
``later``           the exceptions that followed from the first
``survived``        faults that the worker had survived, and how long before its end
``exit_status``     a signal's number negated; null if the process never started
``stderr``          the last lines that the worker wrote to stderr
``state``           the worker's state before its loss
``phase``, ``inferences``, ``running``, ``waiting``, ``memory``   by the worker's last heartbeat
``breadcrumb``      the requests of the worker's last forward pass; null where they are not known
``requests``        requests in flight, where the worker could still name them
``suspects``, ``marked``   the requests that may have caused the loss
``lived_s``         seconds since the worker was spawned
``done``            the reaper's reaction

A record is not meant to hold a prompt, but Python quotes the values that it complains of:
quotations long enough to be somebody's text are cut out of exceptions and stderr.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from pydantic import TypeAdapter

from mayfly_protocol.breadcrumb import Breadcrumb
from mayfly_protocol.common.logs import redacted
from mayfly_protocol.common.throttle import LogThrottle
from mayfly_protocol.lifecycle import Beat, Cause
from mayfly_protocol.roster import Autopsy, Loss
from mayfly_reaper.observer import About, SafeObserver
from mayfly_reaper.paths import private
from mayfly_reaper.rules.actions import RecordLoss
from mayfly_reaper.rules.exit_cause import Verdict
from mayfly_reaper.rules.incarnation import Incarnation

MAX_FILE_BYTES = 4 << 20
"""Bytes in the crash log's file at which the file is put aside and a new one begun."""
KEPT_FILES = 3
"""Number of full files of the crash log that are kept beside the present file."""
RECENT_AUTOPSIES = 8
"""Number of a node's latest crash records that are published to front ends."""

STDERR_LINES = 200
MAX_CAUSE_CHARACTERS = 300

_AUTOPSY = TypeAdapter(Autopsy)


class LossPublisher(Protocol):
    """Publishes the crash records (autopsies) of lost workers to front ends."""

    def add_autopsy(self, autopsy: Autopsy, now: float) -> None: ...


class CrashLog:
    """Writer of the crash records (autopsies) of lost workers. If the disk is full, a record is
    missing in the file, and nothing else fails.

    Args:
        epoch: the id of this reaper's process.
        publisher: gets each crash record for front ends, at first the latest records of earlier
            reapers.
    """

    def __init__(
        self, path: Path, epoch: str, observer: SafeObserver, publisher: LossPublisher
    ) -> None:
        self._path = path
        self._epoch = epoch
        self._observer = observer
        self._note_once = LogThrottle(observer.note, quiet_s=math.inf)
        self._publisher = publisher
        try:
            for each in recent_autopsies(path, datetime.now(UTC)):
                publisher.add_autopsy(each, time.monotonic())
        except OSError as error:
            self._note_once(f"records of workers lost earlier cannot be read: {error}")

    def add(self, slot: str, model: str, loss: RecordLoss) -> None:
        """Notes the loss of a worker for the operator, writes its crash record and publishes the
        record."""
        worker = loss.worker
        text = f"worker {worker.number} (pid {worker.pid}) of slot {slot} was lost"
        self._observer.note(
            f"{text}: {loss.verdict.text}; {loss.done}", About(slot, worker.number, bad=True)
        )
        record = autopsy_record(
            loss,
            slot=slot,
            model=model,
            epoch=self._epoch,
            time=datetime.now(UTC),
            now=time.monotonic(),
        )
        try:
            append_record(self._path, record)
        except OSError as error:
            self._note_once(f"records of lost workers cannot be written: {error}")
        self._publisher.add_autopsy(short_autopsy(record), time.monotonic())


# -- one loss --------------------------------------------------------------------------------


def loss_for_roster(
    slot: str, worker: Incarnation, verdict: Verdict, crumb: Breadcrumb | None
) -> Loss:
    """Returns the announcement of a worker's loss to front ends, made before the worker's process
    is gone. ``crumb`` is the record of the worker's last forward pass."""
    suspects, marked = suspects_of(worker, verdict, crumb)
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


def suspects_of(
    worker: Incarnation, verdict: Verdict, crumb: Breadcrumb | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns two groups of requests that may have caused the loss of a worker: the suspects and
    the marked requests. Both were in the worker's last forward pass, but the marked ones had run
    for a while before.

    They are read from ``crumb``, the record of the last forward pass; without it, the suspects are
    those that the worker's own report of its fault names. Both groups are empty if no request can
    have caused the fault, such as somebody's SIGKILL or another process's reset of the GPU.
    """
    if not verdict.blames_requests:
        return (), ()
    if crumb is not None:
        return crumb.suspects, crumb.marked
    return (worker.fault.suspects if worker.fault is not None else ()), ()


def autopsy_record(
    loss: RecordLoss, *, slot: str, model: str, epoch: str, time: datetime, now: float
) -> dict[str, Any]:
    """Returns the crash record of a lost worker, as it is written to the file. ``now`` is by the
    reaper's monotonic clock, ``time`` by the wall clock, for people."""
    worker, verdict, exited = loss.worker, loss.verdict, loss.worker.exit
    beat = worker.beat or Beat(phase="loading", progress=0)
    crumb = exited.crumb if exited is not None else None
    suspects, marked = suspects_of(worker, verdict, crumb)
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
        "done": loss.done,
    }


def short_autopsy(record: dict[str, Any], age_s: float = 0.0) -> Autopsy:
    """Returns a crash record in short form for front ends, with an age instead of a time, since the
    clocks of two machines may differ.

    Raises:
        KeyError, TypeError, ValueError: the record is incomplete, or has a type for which front
            ends would refuse the node's whole state.
    """
    text = str(record["first_cause"]["text"])
    cause = text.partition("\n")[0][:MAX_CAUSE_CHARACTERS]
    return _AUTOPSY.validate_python({**record, "first_cause": cause, "age_s": age_s})


def _cause(cause: Cause) -> dict[str, str]:
    return {
        "type": cause.type,
        "text": redacted(cause.text),
        "traceback": redacted(cause.traceback),
    }


def _lines(stderr: str) -> list[str]:
    return [redacted(line) for line in stderr.splitlines()[-STDERR_LINES:]]


# -- the file --------------------------------------------------------------------------------


def append_record(path: Path, record: dict[str, Any]) -> None:
    """Adds one crash record to the file, or to a new file if the present one is full. Raises
    OSError, as on a full disk; the caller goes on without the record."""
    text = json.dumps(record, ensure_ascii=False)
    line = text.encode(errors="backslashreplace") + b"\n"  # names of files may be no UTF-8
    size = path.stat().st_size if path.exists() else 0
    if size and size + len(line) > MAX_FILE_BYTES:
        _rotate(path)
        size = 0
    with open(path, "ab+", opener=private) as file:
        if size:
            file.seek(-1, 2)
            if file.read(1) != b"\n":  # a line that was cut short must not take this one with it
                line = b"\n" + line
        file.write(line)


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yields all crash records that are kept, the oldest first, without lines that were cut
    short."""
    for number in range(KEPT_FILES, -1, -1):
        file = _rotated(path, number)
        if not file.exists():
            continue
        for line in file.read_text(encoding="utf-8", errors="replace").split("\n"):
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                yield record


def recent_autopsies(path: Path, now: datetime) -> Iterator[Autopsy]:
    """Yields the latest crash records of a file in short form, the oldest first, without records
    that another version wrote in another form. Raises OSError if the file exists and cannot be
    read."""
    for record in deque(read_records(path), maxlen=RECENT_AUTOPSIES):
        try:
            written = datetime.fromisoformat(record["time"])
            found = short_autopsy(record, max(0.0, (now - written).total_seconds()))
        except (KeyError, TypeError, ValueError):
            continue
        yield found


def _rotated(path: Path, number: int) -> Path:
    return path.with_suffix(f".{number}{path.suffix}") if number else path


def _rotate(path: Path) -> None:
    for number in range(KEPT_FILES, 0, -1):
        younger = _rotated(path, number - 1)
        if younger.exists():
            younger.replace(_rotated(path, number))
