"""The command as a whole: quick to start, and clear about wrong usage."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mayfly_reaper.paths import locked
from mayfly_server.cli import app

HEAVY = {"mlx", "mlx_lm", "httpx", "rich.progress", "fastapi", "zmq", "pydantic", "transformers"}


def test_its_help_imports_nothing_heavy() -> None:
    """Start-up time, in a form that a busy machine can't falsify."""
    code = "import sys, mayfly_server.cli; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert HEAVY.isdisjoint(ran.stdout.split())


@pytest.mark.parametrize("command", ["serve", "status", "chat", "version"])
def test_every_command_explains_itself(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert command in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "--port", "65536"],
        ["serve", "--workers", "0"],
        ["serve", "--adapter", "no/such/folder"],
        ["serve", "--state-dir", __file__],
        ["serve", "--kv-bits", "1"],
        ["serve", "one-model", "another-model"],
        ["dance"],
    ],
)
def test_wrong_usage_has_its_own_exit_code(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "Usage" in result.stderr


def test_version_names_mayfly_and_mlx() -> None:
    result = CliRunner().invoke(app, ["version"])
    assert result.exit_code == 0
    assert {"mayfly", "python", "mlx", "mlx-lm"} <= {
        line.split()[0] for line in result.output.splitlines()
    }


def test_a_taken_port_is_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(app, ["serve", "--port", port, "--state-dir", str(tmp_path)])
    assert result.exit_code == 1
    assert f"cannot listen on 127.0.0.1 port {port}" in result.stderr
    assert "--port" in result.stderr
    assert result.stdout == ""


def test_a_held_state_folder_is_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    with locked(tmp_path):
        result = CliRunner().invoke(app, ["serve", "--port", "0", "--state-dir", str(tmp_path)])
    assert result.exit_code == 1
    assert f"pid {os.getpid()}" in result.stderr
    assert "--state-dir" in result.stderr
    assert result.stdout == ""
