"""``mayfly doctor``: a real examination of a tiny model, and the output for other results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mayfly_cli.app import app
from mayfly_cli.commands.doctor import size
from mayfly_protocol.capabilities import Capabilities, shown

DIAGNOSIS: dict[str, Any] = {
    "model": "big",
    "path": "/models/big",
    "architecture": "qwen3_next",
    "device": "Apple M4 Max",
    "context": 262144,
    "file_bytes": 45_000_000_000,
    "weight_bytes": 44_900_000_000,
    "memory_bytes": 96_000_000_000,
    "kv_budget": 36_800_000_000,
    "kv_bytes_per_token": 24_576,
    "kv_bytes_per_row": 77_000_000,
    "max_rows": 32,
    "fits": True,
    "capabilities": shown(Capabilities(context=262144, context_from="a key", rows=32, window=512)),
    "rows": [{"context": 2048, "rows": 32}, {"context": 262144, "rows": 2}],
}


def shown_lines(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> tuple[int, list[list[str]]]:
    monkeypatch.setattr(
        "mayfly_cli.commands.doctor.examine", lambda command: {**DIAGNOSIS, **changes}
    )
    result = CliRunner().invoke(app, ["doctor"])
    return result.exit_code, [line.split() for line in result.stdout.splitlines()]


@pytest.mark.process
def test_a_model_is_examined(tiny_model: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", str(tiny_model), "--json", "--max-rows", "5"])
    assert result.exit_code == 0
    told = json.loads(result.stdout)
    assert told.keys() == DIAGNOSIS.keys()
    assert told["rows"] == [{"context": 2048, "rows": 5}]


@pytest.mark.process
def test_why_there_is_nothing_to_examine_is_said() -> None:
    result = CliRunner().invoke(app, ["doctor", "./nothing"])
    assert result.exit_code == 1
    assert "There is no folder ./nothing" in result.stderr


def test_a_missing_mlx_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "pip install '.[cpu]'" in " ".join(result.stderr.split())


def test_sizes_and_rows_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    code, lines = shown_lines(monkeypatch)
    assert code == 0
    assert lines[0] == ["big", "(qwen3_next)", "on", "Apple", "M4", "Max"]
    assert ["weights", "44.9", "GB"] in lines
    assert [
        "KV",
        "cache",
        "24.6",
        "kB",
        "a",
        "token",
        "and",
        "77.0",
        "MB",
        "a",
        "sequence",
    ] in lines
    assert ["2,048", "32", "(--max-rows)"] in lines
    assert ["262,144", "2"] in lines


def test_capabilities_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    _, lines = shown_lines(monkeypatch)
    assert ["context", "262,144", "tokens", "(a", "key)"] in lines
    assert ["sequences", "32", "at", "once"] in lines
    assert ["window", "512", "tokens"] in lines


def test_M09_a_model_that_runs_one_sequence_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    can = Capabilities(rows=1, one_row_because="mlx-lm cannot batch caches of the class Odd")
    code, lines = shown_lines(monkeypatch, capabilities=shown(can), max_rows=1)
    assert code == 0
    assert f"sequences one at a time: {can.one_row_because}".split() in lines


def test_what_does_not_fit_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    code, lines = shown_lines(monkeypatch, fits=False, rows=[{"context": 2048, "rows": 0}])
    assert code == 1
    assert lines[-1] == ["It", "does", "not", "fit."]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (46_080, "46.1 kB"), (1_200_000_000, "1.2 GB")],
)
def test_sizes_are_for_people(count: int, text: str) -> None:
    assert size(count) == text
