"""Workers that outlive their reaper."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mayfly_reaper.orphans import Entry, Ledger, Orphans
from node_harness import wait_until

TOLD = '{"slot": "s-0", "incarnation": 7}'


@pytest.fixture
def orphan() -> Iterator[subprocess.Popen[bytes]]:
    with started("--settings", TOLD) as process:
        yield process
        process.kill()


def started(*arguments: str) -> subprocess.Popen[bytes]:
    waits = "import sys; sys.stdin.read()"
    return subprocess.Popen([sys.executable, "-c", waits, *arguments], stdin=subprocess.PIPE)


def test_an_orphan_is_waited_for_until_it_leaves(orphan: subprocess.Popen[bytes]) -> None:
    entry = Entry("s-0", 7, orphan.pid, TOLD)
    orphans = Orphans([entry], overdue_at=100.0)
    assert orphans.look(99.9) == [entry]
    assert orphan.stdin is not None
    orphan.stdin.close()
    wait_until(lambda: orphans.look(99.9) == [], "the orphan leaves")
    assert orphan.wait() == 0


def test_one_that_overstays_is_killed(orphan: subprocess.Popen[bytes]) -> None:
    orphans = Orphans([Entry("s-0", 7, orphan.pid, TOLD)], overdue_at=100.0)
    wait_until(lambda: orphans.look(100.0) == [], "the orphan is killed")
    assert orphan.wait() == -9


@pytest.mark.parametrize("told", ['{"slot": "s-0", "incarnation": 8}', "", "s-0"])
def test_a_stranger_with_an_orphans_pid_is_left_alone(
    orphan: subprocess.Popen[bytes], told: str
) -> None:
    orphans = Orphans([Entry("s-0", 7, orphan.pid, told)], overdue_at=0.0)
    assert orphans.look(1.0) == []
    assert orphan.poll() is None


def test_a_pid_that_became_a_strangers_meanwhile_is_left_alone(
    orphan: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    orphans = Orphans([Entry("s-0", 7, orphan.pid, TOLD)], overdue_at=0.0)
    [(_, process)] = orphans._living
    process._ident = (orphan.pid, 12345.0)  # as if it had been started at another time
    assert orphans.look(1.0) == []
    assert orphan.poll() is None


def test_those_that_are_gone_and_oneself_are_no_orphans() -> None:
    with started(TOLD) as process:
        process.kill()
    assert Orphans([Entry("s-0", 7, process.pid, TOLD)], 0.0).look(1.0) == []


def test_a_ledger_holds_those_that_live(tmp_path: Path) -> None:
    notes: list[str] = []
    path = tmp_path / "workers.json"
    ledger = Ledger(path, notes.append)
    assert ledger.left_behind() == []
    one, two = Entry("s-0", 1, 17, "told"), Entry("s-1", 2, 18, "told, too")
    ledger.add(one)
    ledger.add(two)
    ledger.remove(1)
    ledger.remove(99)
    assert Ledger(path, notes.append).left_behind() == [two]
    for wrong in ("", "[{}]", "17", '[{"slot": 1}]'):
        path.write_text(wrong)
        assert ledger.left_behind() == []
    assert notes == []


def test_a_ledger_that_cannot_be_written_is_said_once(tmp_path: Path) -> None:
    notes: list[str] = []
    ledger = Ledger(tmp_path / "missing" / "workers.json", notes.append)
    for number in range(3):
        ledger.add(Entry("s-0", number, 17, "told"))
    assert len(notes) == 1
    assert "cannot be written" in notes[0]
