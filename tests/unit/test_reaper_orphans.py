"""Workers that outlive their reaper."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mayfly_reaper.processes.children import Orphans, WorkerEntry, WorkersFile
from support.node import wait_until

SETTINGS = '{"slot": "s-0", "incarnation": 7}'


@pytest.fixture
def orphan() -> Iterator[subprocess.Popen[bytes]]:
    with started("--settings", SETTINGS) as process:
        yield process
        process.kill()


def started(*arguments: str) -> subprocess.Popen[bytes]:
    waits = "import sys; sys.stdin.read()"
    return subprocess.Popen([sys.executable, "-c", waits, *arguments], stdin=subprocess.PIPE)


def left_behind(tmp_path: Path, pid: int, settings: str = SETTINGS) -> WorkersFile:
    """Returns the workers file that the next reaper reads, with this worker in it."""
    path = tmp_path / "workers.json"
    WorkersFile(path, print).add(WorkerEntry("s-0", 7, pid, settings))
    return WorkersFile(path, print)


@pytest.mark.process
def test_an_orphan_is_waited_for_until_it_leaves(
    tmp_path: Path, orphan: subprocess.Popen[bytes]
) -> None:
    workers_file = left_behind(tmp_path, orphan.pid)
    orphans = Orphans(workers_file, overdue_at=100.0)
    assert [entry.pid for entry in orphans.poll(99.9)] == [orphan.pid]
    assert [entry.pid for entry in workers_file.entries] == [orphan.pid]
    assert orphan.stdin is not None
    orphan.stdin.close()
    wait_until(lambda: orphans.poll(99.9) == [], "the orphan leaves")
    assert orphan.wait() == 0
    assert workers_file.entries == []


@pytest.mark.process
def test_one_that_overstays_is_killed(tmp_path: Path, orphan: subprocess.Popen[bytes]) -> None:
    orphans = Orphans(left_behind(tmp_path, orphan.pid), overdue_at=100.0)
    wait_until(lambda: orphans.poll(100.0) == [], "the orphan is killed")
    assert orphan.wait() == -9


@pytest.mark.process
def test_a_reaper_that_is_killed_as_well_leaves_word_of_the_first_ones_orphans(
    tmp_path: Path, orphan: subprocess.Popen[bytes]
) -> None:
    second = left_behind(tmp_path, orphan.pid)
    Orphans(second, overdue_at=100.0).poll(0.0)
    second.add(WorkerEntry("s-1", 8, 17, "told"))
    third = WorkersFile(tmp_path / "workers.json", print)
    assert [entry.pid for entry in third.entries] == [orphan.pid, 17]


@pytest.mark.process
@pytest.mark.parametrize("settings", ['{"slot": "s-0", "incarnation": 8}', "", "s-0"])
def test_a_stranger_with_an_orphans_pid_is_left_alone(
    tmp_path: Path, orphan: subprocess.Popen[bytes], settings: str
) -> None:
    orphans = Orphans(left_behind(tmp_path, orphan.pid, settings), overdue_at=0.0)
    assert orphans.poll(1.0) == []
    assert orphan.poll() is None


@pytest.mark.process
def test_a_pid_that_became_a_strangers_meanwhile_is_left_alone(
    tmp_path: Path, orphan: subprocess.Popen[bytes]
) -> None:
    orphans = Orphans(left_behind(tmp_path, orphan.pid), overdue_at=0.0)
    [process] = orphans._left.values()
    assert process is not None
    process._ident = (orphan.pid, 12345.0)  # as if it had been started at another time
    assert orphans.poll(1.0) == []
    assert orphan.poll() is None


@pytest.mark.process
def test_those_that_are_gone_are_no_orphans(tmp_path: Path) -> None:
    with started(SETTINGS) as process:
        process.kill()
    assert Orphans(left_behind(tmp_path, process.pid), 0.0).poll(1.0) == []


def test_a_ledger_holds_those_that_live(tmp_path: Path) -> None:
    notes: list[str] = []
    path = tmp_path / "workers.json"
    workers_file = WorkersFile(path, notes.append)
    assert workers_file.entries == []
    one, two = WorkerEntry("s-0", 1, 17, "told"), WorkerEntry("s-1", 2, 18, "told, too")
    workers_file.add(one)
    workers_file.add(two)
    workers_file.remove(1)
    workers_file.remove(99)
    assert WorkersFile(path, notes.append).entries == [two]
    for wrong in ("", "[{}]", "17", '[{"slot": 1}]'):
        path.write_text(wrong)
        assert WorkersFile(path, notes.append).entries == []
    assert notes == []


def test_a_ledger_that_cannot_be_written_is_said_once(tmp_path: Path) -> None:
    notes: list[str] = []
    workers_file = WorkersFile(tmp_path / "missing" / "workers.json", notes.append)
    for number in range(3):
        workers_file.add(WorkerEntry("s-0", number, 17, "told"))
    assert len(notes) == 1
    assert "cannot be written" in notes[0]
