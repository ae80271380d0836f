"""Autopsies: the records of lost workers."""

from __future__ import annotations

import json
import os
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from mayfly_protocol.breadcrumb import Breadcrumb
from mayfly_protocol.common.logs import MAX_LINE_CHARACTERS, redacted
from mayfly_protocol.counters import Memory
from mayfly_protocol.lifecycle import Beat, Cause, Fault
from mayfly_reaper import crash_log as autopsies
from mayfly_reaper.crash_log import (
    append_record,
    autopsy_record,
    read_records,
)
from mayfly_reaper.rules.actions import RecordLoss
from mayfly_reaper.rules.events import ProcessExited
from mayfly_reaper.rules.exit_cause import Verdict
from mayfly_reaper.rules.incarnation import Incarnation, SurvivedFault

FAULT = Fault("k", "worker", Cause("E", "first"), (), ("r1", "r2"), ("r2",))
WORKER = Incarnation(
    number=7,
    spawned_at=100.0,
    last_message_at=110.0,
    last_progress_at=110.0,
    state="gone",
    state_before_gone="ready",
    pid=4711,
    beat=Beat("decode", 5, running=2, waiting=1, inferences=9, memory=Memory(footprint=12)),
    fault=FAULT,
    survived=(SurvivedFault(109.0, Fault("shape", "batch", Cause("ValueError", "odd"))),),
    exit=ProcessExited(7, -6, "one\ntwo\n", Breadcrumb("decode", 5, ("r3", "r1"), ("r3",))),
)
VERDICT = Verdict("k", "worker", Cause("E", "first", "Traceback"), (Cause("E", "later"),))


def written(worker: Incarnation = WORKER) -> dict[str, object]:
    return autopsy_record(
        RecordLoss(worker, VERDICT, "a new worker starts at once"),
        slot="s-0",
        model="org/model",
        epoch="abcd",
        time=datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC),
        now=111.5,
    )


def test_a_loss_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "autopsies.jsonl"
    append_record(path, written())
    append_record(path, written())
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
        "survived": [{"kind": "shape", "scope": "batch", "text": "odd", "ago_s": 2.5}],
        "exit_status": -6,
        "stderr": ["one", "two"],
        "state": "ready",
        "phase": "decode",
        "inferences": 9,
        "running": 2,
        "waiting": 1,
        "memory": {
            "footprint": 12,
            "active": 0,
            "cache": 0,
            "peak": 0,
            "prefix_cache": 0,
            "device_free": None,
        },
        "breadcrumb": {"phase": "decode", "step": 5, "requests": ["r3", "r1"], "young": ["r3"]},
        "requests": ["r1", "r2"],
        "suspects": ["r3"],
        "marked": ["r1"],
        "lived_s": 11.5,
        "done": "a new worker starts at once",
    }


def test_a_process_that_never_spoke_is_written_too() -> None:
    record = written(
        Incarnation(number=8, spawned_at=111.0, last_message_at=111.0, last_progress_at=111.0)
    )
    assert (record["pid"], record["exit_status"], record["stderr"]) == (0, None, [])
    assert record["requests"] == []


def test_a_record_that_cannot_be_written_is_the_callers_to_know(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        append_record(tmp_path / "missing" / "autopsies.jsonl", written())


def test_a_file_that_is_full_is_put_aside_and_the_oldest_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autopsies, "MAX_FILE_BYTES", 60)
    path = tmp_path / "autopsies.jsonl"
    for number in range(20):
        append_record(path, {"id": f"abcd-{number}", "stderr": "." * 10})
    kept = [record["id"] for record in read_records(path)]
    assert kept == [f"abcd-{number}" for number in range(20 - len(kept), 20)]
    assert len(list(tmp_path.iterdir())) == 1 + autopsies.KEPT_FILES
    assert all(file.stat().st_size <= 60 for file in tmp_path.iterdir())


def test_a_line_that_was_cut_short_takes_no_other_with_it(tmp_path: Path) -> None:
    path = tmp_path / "autopsies.jsonl"
    append_record(path, {"id": "one"})
    with path.open("a") as file:
        file.write('{"id": "tw')  # and the disk was full
    append_record(path, {"id": "three \u2028 still one line"})
    assert [record["id"] for record in read_records(path)] == ["one", "three \u2028 still one line"]
    assert list(read_records(tmp_path / "none.jsonl")) == []


PROMPT = "Once upon a time, in a land far, far away, there was a prompt that nobody was to read."


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (f"KeyError: {PROMPT!r}", f"KeyError: '({len(PROMPT)} characters)'"),
        (f'{{"text": "{PROMPT}", "n": 1}}', f'{{"text": \'({len(PROMPT)} characters)\', "n": 1}}'),
        ("x '" + PROMPT, f"x '({len(PROMPT)} characters)'"),
        (
            "it can't be, and won't be, so I don't see why it shouldn't have been as it was then",
            None,
        ),
        ("what():  [METAL] Command buffer execution failed: 'Timeout'", None),
        (f'  File "/usr/lib/{"x" * 60}/site.py", line 3, in <module>', None),
        (f"'short' {PROMPT!r} 'short'", f"'short' '({len(PROMPT)} characters)' 'short'"),
    ],
)
def test_long_quotations_are_cut_out(text: str, kept: str | None) -> None:
    assert redacted(text) == (text if kept is None else kept)


def test_no_text_takes_long_to_redact() -> None:
    began = time.thread_time()
    redacted("'a " * 30_000)
    assert len(redacted("x" * 100_000)) == MAX_LINE_CHARACTERS
    assert time.thread_time() - began < 1.0


def test_a_file_whose_name_is_no_unicode_is_written_down_too(tmp_path: Path) -> None:
    said = os.fsdecode(b"/models/caf\xe9: no such file")
    append_record(tmp_path / "autopsies.jsonl", written() | {"first": said})
    [record] = read_records(tmp_path / "autopsies.jsonl")
    assert record["first"] == said
