"""What is kept of every worker that was lost: one JSON object a line in ``autopsies.jsonl``.

``id``              names the record: the reaper's epoch and the incarnation
``time``            when it was written, UTC
``slot``, ``model``, ``incarnation``, ``pid``
``kind``, ``scope`` what it was (:mod:`mayfly_reaper.verdict`)
``first_cause``     the exception that came first, with its traceback where there is one
``later``           what only followed from it
``exit_status``     a signal's number negated; null if the process never started
``stderr``          its last lines
``state``           the slot's before the verdict; ``phase`` the engine's, by its last beat
``inferences``, ``running``, ``waiting``, ``memory``   by its last beat
``requests``, ``suspects``   in flight, where the worker could still name them
``lived_s``         since it was spawned
``done``            what the reaper did then
"""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from mayfly_protocol.lifecycle import Beat
from mayfly_reaper.actions import Record


def autopsy(
    record: Record, *, slot: str, model: str, epoch: str, time: datetime, now: float
) -> dict[str, Any]:
    """The record of a loss as it is written. ``now`` is of the reaper's clock, ``time`` the
    wall's, for people."""
    life, verdict = record.life, record.verdict
    beat = life.beat or Beat(phase="loading", progress=0)
    fault = life.fault
    return {
        "id": f"{epoch}-{life.number}",
        "time": time.isoformat(timespec="milliseconds"),
        "slot": slot,
        "model": model,
        "incarnation": life.number,
        "pid": life.pid,
        "kind": verdict.kind,
        "scope": verdict.scope,
        "first_cause": asdict(verdict.first),
        "later": [asdict(cause) for cause in verdict.later],
        "exit_status": life.exit.status if life.exit is not None else None,
        "stderr": life.exit.stderr.splitlines() if life.exit is not None else [],
        "state": record.state,
        "phase": beat.phase,
        "inferences": beat.inferences,
        "running": beat.running,
        "waiting": beat.waiting,
        "memory": asdict(beat.memory),
        "requests": list(fault.requests) if fault is not None else [],
        "suspects": list(fault.suspects) if fault is not None else [],
        "lived_s": round(now - life.spawned_at, 3),
        "done": record.done,
    }


def append(path: Path, record: dict[str, Any]) -> None:
    """Adds one line. Raises OSError (a full disk, say): the caller goes on without it."""
    line = json.dumps(record, ensure_ascii=False) + "\n"
    with path.open("a", encoding="utf-8") as file:
        file.write(line)
