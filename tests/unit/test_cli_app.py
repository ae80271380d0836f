"""The command as a whole: quick to start, and clear about wrong usage."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mayfly_cli.app import app
from mayfly_reaper.paths import locked

HEAVY = {"mlx", "mlx_lm", "httpx", "rich.progress", "fastapi", "zmq", "pydantic", "transformers"}


@pytest.mark.process
def test_its_help_imports_nothing_heavy() -> None:
    """Start-up time, in a form that a busy machine can't falsify."""
    code = "import sys, mayfly_cli.app; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert HEAVY.isdisjoint(ran.stdout.split())


@pytest.mark.process
def test_an_early_ctrl_c_is_understood() -> None:
    """While the command line is still being imported, too."""
    code = (
        "import signal, sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'mayfly_cli.commands.serve':\n"
        "            signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "from mayfly_cli.__main__ import main\n"
        "main()\n"
    )
    ran = subprocess.run([sys.executable, "-c", code, "version"], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


def test_the_version_is_told_where_it_is_looked_for() -> None:
    asked = CliRunner().invoke(app, ["--version"])
    assert asked.exit_code == 0 and asked.stdout.startswith("mayfly ")
    assert asked.stdout == CliRunner().invoke(app, ["version"]).stdout


@pytest.mark.parametrize("command", ["serve", "status", "top", "chat", "version"])
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
        ["serve", "--kv-bits", "7"],
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
