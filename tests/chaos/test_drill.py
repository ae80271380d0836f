"""``mayfly drill`` on a running server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support.server import serving, wait_for

BUDGETS = {"retry_s": 0.1, "retry_max_s": 0.5, "spacing_s": 0.1}


@pytest.mark.parametrize(
    ("signals", "kinds"),
    [
        ("kill", ["killed"]),
        pytest.param(
            "kill,segv,abrt,stop",
            ["killed", "crashed", "aborted", "silent"],
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_deployment_passes_its_drill(
    scripted_model: Callable[..., Path], tmp_path: Path, signals: str, kinds: list[str]
) -> None:
    model = scripted_model(step_s=0.01)
    options = ("--trust-remote-code", "--workers", "2")
    with serving(model, tmp_path, *options, budgets=BUDGETS) as server:
        wait_for(lambda: all(s["state"] == "ready" for s in server.slots()), "every worker")
        command = [sys.executable, "-m", "mayfly_cli", "drill", "--url", server.url]
        command += ["--clients", "4", "--tokens", "150", "--signals", signals, "--json"]
        drill = subprocess.run(command, capture_output=True, text=True, timeout=200)
        assert drill.returncode == 0, drill.stdout + drill.stderr
        found = json.loads(drill.stdout)
        assert found["passed"] is True
        assert (found["failed"], found["reworded"]) == (0, 0)
        names = [f"SIG{name.upper()}" for name in signals.split(",")]
        assert [strike["signal"] for strike in found["strikes"]] == names
        assert all(strike["continued"] >= 1 for strike in found["strikes"])
        assert all(strike["interruptions_s"] for strike in found["strikes"])
        assert [autopsy["kind"] for autopsy in server.autopsies()] == kinds
