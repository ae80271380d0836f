"""What is written down of a loss."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from mayfly_protocol.lifecycle import Beat, Cause, Fault, Memory
from mayfly_reaper.actions import Record
from mayfly_reaper.autopsy import append, autopsy
from mayfly_reaper.events import Exited
from mayfly_reaper.incarnation import Incarnation
from mayfly_reaper.verdict import Verdict

FAULT = Fault("k", "worker", Cause("E", "first"), (), ("r1", "r2"), ("r2",))
LIFE = Incarnation(
    number=7,
    spawned_at=100.0,
    heard_at=110.0,
    moved_at=110.0,
    pid=4711,
    beat=Beat("decode", 5, running=2, waiting=1, inferences=9, memory=Memory(footprint=12)),
    fault=FAULT,
    exit=Exited(7, -6, "one\ntwo\n"),
)
VERDICT = Verdict("k", "worker", Cause("E", "first", "Traceback"), (Cause("E", "later"),))


def written(life: Incarnation = LIFE) -> dict[str, object]:
    return autopsy(
        Record(life, VERDICT, "ready", "respawned at once"),
        slot="s-0",
        model="org/model",
        epoch="abcd",
        time=datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC),
        now=111.5,
    )


def test_a_loss_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "autopsies.jsonl"
    append(path, written())
    append(path, written())
    first, second = path.read_text().splitlines()
    assert first == second
    assert json.loads(first) == {
        "id": "abcd-7",
        "time": "2030-01-02T03:04:05.000+00:00",
        "slot": "s-0",
        "model": "org/model",
        "incarnation": 7,
        "pid": 4711,
        "kind": "k",
        "scope": "worker",
        "first_cause": {"type": "E", "text": "first", "traceback": "Traceback"},
        "later": [{"type": "E", "text": "later", "traceback": ""}],
        "exit_status": -6,
        "stderr": ["one", "two"],
        "state": "ready",
        "phase": "decode",
        "inferences": 9,
        "running": 2,
        "waiting": 1,
        "memory": {"footprint": 12, "active": 0, "cache": 0, "peak": 0, "prefix_cache": 0},
        "requests": ["r1", "r2"],
        "suspects": ["r2"],
        "lived_s": 11.5,
        "done": "respawned at once",
    }


def test_a_process_that_never_spoke_is_written_too() -> None:
    record = written(Incarnation(number=8, spawned_at=111.0, heard_at=111.0, moved_at=111.0))
    assert (record["pid"], record["exit_status"], record["stderr"]) == (0, None, [])
    assert record["requests"] == []


def test_a_record_that_cannot_be_written_is_the_callers_to_know(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        append(tmp_path / "missing" / "autopsies.jsonl", written())
