"""``mayfly faults`` and ``mayfly faults show``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import Result

from mayfly_reaper.crash_log import append_record
from support.command_line import mayfly


def record(number: int, kind: str, text: str) -> dict[str, object]:
    return {
        "id": f"abcd-{number}",
        "time": f"2030-01-02T03:04:{number:02}.000+00:00",
        "slot": "smol-0",
        "model": "org/smol",
        "incarnation": number,
        "kind": kind,
        "scope": "worker",
        "first_cause": {"type": "RuntimeError", "text": text, "traceback": "Traceback: here"},
        "later": [{"type": "RuntimeError", "text": "the mask", "traceback": ""}],
        "survived": [{"kind": "shape", "scope": "batch", "text": "odd", "ago_s": 2.5}],
        "stderr": ["one", "two"],
        "exit_status": -6,
        "done": "a new worker starts at once",
    }


@pytest.fixture
def state(tmp_path: Path) -> Path:
    path = tmp_path / "autopsies.jsonl"
    append_record(path, record(1, "metal_timeout", "[METAL] first\nand more"))
    append_record(path, record(12, "crashed", "killed by SIGSEGV"))
    return tmp_path


def run(*arguments: object) -> Result:
    return mayfly("faults", *arguments)


def test_losses_are_listed_one_a_line(state: Path) -> None:
    result = run("--state-dir", state)
    assert result.exit_code == 0
    header, first, second = result.stdout.splitlines()
    assert header.split() == ["ID", "TIME", "SLOT", "KIND", "SCOPE", "FIRST", "CAUSE"]
    assert first.split()[0] == "abcd-1"
    assert first.split()[3:] == ["smol-0", "metal_timeout", "worker", "[METAL]", "first"]
    assert "killed by SIGSEGV" in second


def test_losses_are_listed_for_programs(state: Path) -> None:
    listed = json.loads(run("--state-dir", state, "--json").stdout)
    assert listed[0] == {
        "id": "abcd-1",
        "time": "2030-01-02T03:04:01.000+00:00",
        "slot": "smol-0",
        "kind": "metal_timeout",
        "scope": "worker",
        "first_cause": "[METAL] first",
    }
    assert [each["id"] for each in listed] == ["abcd-1", "abcd-12"]


def test_where_nothing_was_lost_nothing_is_listed(tmp_path: Path) -> None:
    assert run("--state-dir", tmp_path).stdout == "No worker was lost.\n"
    assert json.loads(run("--state-dir", tmp_path / "none", "--json").stdout) == []


def test_one_is_shown_whole_with_what_it_means(state: Path) -> None:
    shown = run("--state-dir", state, "show", "abcd-1").stdout
    assert shown.startswith("metal_timeout (scope: worker): [METAL] first\n")
    for part in ("GPU watchdog", "Traceback: here", "the mask", "shape, 2.5 s before", "one\ntwo"):
        assert part in shown
    assert run("show", "1", "--state-dir", state).stdout == shown


def test_one_is_shown_for_programs_as_it_was_written(state: Path) -> None:
    shown = run("show", "abcd-12", "--json", "--state-dir", state).stdout
    assert json.loads(shown) == record(12, "crashed", "killed by SIGSEGV")


@pytest.mark.parametrize("name", ["x", "abcd", "2"])
def test_a_name_that_means_none_is_refused(state: Path, name: str) -> None:
    result = run("show", name, "--state-dir", state)
    assert result.exit_code == 1
    assert f"no record has the id '{name}'" in result.stderr
