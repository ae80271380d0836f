"""What is kept of every worker that was lost: one JSON object a line in ``autopsies.jsonl``.

``id``              names the record: the reaper's epoch and the incarnation
``time``            when it was written, UTC
``slot``, ``model``, ``incarnation``, ``pid``
``kind``, ``scope`` what it was (:mod:`mayfly_reaper.verdict`)
``first_cause``     the exception that came first, with its traceback where there is one
``later``           what only followed from it
``survived``        faults before it that the worker had outlived, and how long before the end
``exit_status``     a signal's number negated; null if the process never started
``stderr``          its last lines
``state``           the slot's before the verdict; ``phase`` the engine's, by its last beat
``inferences``, ``running``, ``waiting``, ``memory``   by its last beat
``breadcrumb``      what its last forward pass was about; null where it left none
``requests``        in flight, where the worker could still name them
``suspects``, ``marked``   which of them may have done it (:mod:`mayfly_reaper.losses`)
``lived_s``         since it was spawned
``done``            what the reaper did then

Nothing in it is meant to hold a prompt (:mod:`mayfly_reaper.redaction`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from mayfly_protocol.lifecycle import Beat, Cause
from mayfly_reaper.actions import Record
from mayfly_reaper.losses import suspicion
from mayfly_reaper.redaction import redacted

MOST_BYTES = 4 << 20
"""Of one file; then it is put aside ..."""
KEPT_FILES = 3
"""... and so many of those are kept."""

STDERR_LINES = 200


def autopsy(
    record: Record, *, slot: str, model: str, epoch: str, time: datetime, now: float
) -> dict[str, Any]:
    """The record of a loss as it is written. ``now`` is of the reaper's clock, ``time`` the
    wall's, for people."""
    life, verdict, exited = record.life, record.verdict, record.life.exit
    beat = life.beat or Beat(phase="loading", progress=0)
    crumb = exited.crumb if exited is not None else None
    suspects, marked = suspicion(life, verdict, crumb)
    return {
        "id": f"{epoch}-{life.number}",
        "time": time.isoformat(timespec="milliseconds"),
        "slot": slot,
        "model": model,
        "incarnation": life.number,
        "pid": life.pid,
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
            for each in life.survived
        ],
        "exit_status": exited.status if exited is not None else None,
        "stderr": _lines(exited.stderr) if exited is not None else [],
        "state": life.before,
        "phase": beat.phase,
        "inferences": beat.inferences,
        "running": beat.running,
        "waiting": beat.waiting,
        "memory": asdict(beat.memory),
        "breadcrumb": asdict(crumb) if crumb is not None else None,
        "requests": list(life.fault.requests) if life.fault is not None else [],
        "suspects": list(suspects),
        "marked": list(marked),
        "lived_s": round(now - life.spawned_at, 3),
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
