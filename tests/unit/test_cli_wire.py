"""Keys for the wire, and arguments that `mayfly node` and `mayfly front` refuse before they
start."""

from __future__ import annotations

import json
import re
import socket
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from mayfly_cli.config.keys import COMMANDS, SERVER
from mayfly_protocol.transport.keys import make_pair, new_pair, secret_file, trusted_file
from support.command_line import mayfly
from support.server import free_port, wait_for


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


def test_a_key_from_its_making_to_its_revocation(state: Path) -> None:
    where = ("--state-dir", str(state))
    assert "keys init" in mayfly("keys", "show", *where).stdout
    made = mayfly("keys", "init", *where)
    own = made.stdout.strip()
    assert len(own) == 64
    assert stat.S_IMODE(secret_file(state).stat().st_mode) == 0o600
    secret = secret_file(state).read_text().strip()
    again = mayfly("keys", "init", *where)
    assert again.exit_code == 1 and "already" in again.stderr

    other = new_pair().public
    assert mayfly("keys", "trust", "gateway-1", other, *where).exit_code == 0
    shown = mayfly("keys", "show", *where)
    assert shown.stdout == f"{own}\ntrusts gateway-1  {other}\n"
    told = json.loads(mayfly("keys", "show", "--json", *where).stdout)
    assert told == {"key": own, "trusted": [{"name": "gateway-1", "key": other}]}

    nobody = mayfly("keys", "revoke", "gateway-2", "--state-dir", str(state / "other"))
    assert nobody.exit_code == 1 and "nor is any other name" in nobody.stderr
    unknown = mayfly("keys", "revoke", "gateway-2", *where)
    assert unknown.exit_code == 1 and "gateway-1" in unknown.stderr
    assert mayfly("keys", "revoke", "gateway-1", *where).exit_code == 0
    assert json.loads(mayfly("keys", "show", "--json", *where).stdout)["trusted"] == []
    assert secret not in "".join((made.output, shown.output, again.output))


@pytest.mark.parametrize(
    ("name", "key", "problem"),
    [
        ("gateway", "not-a-key", "64 hex digits"),
        ("two words", "0f" * 32, "not a valid name"),
        ("gateway", "0F" * 32, "64 hex digits"),
    ],
)
def test_what_cannot_be_trusted(state: Path, name: str, key: str, problem: str) -> None:
    refused = mayfly("keys", "trust", name, key, "--state-dir", str(state))
    assert refused.exit_code == 1 and problem in refused.stderr
    assert not trusted_file(state).exists()


def test_two_of_one_name(state: Path) -> None:
    where = ("--state-dir", str(state))
    assert mayfly("keys", "trust", "a", new_pair().public, *where).exit_code == 0
    refused = mayfly("keys", "trust", "a", new_pair().public, *where)
    assert refused.exit_code == 1 and "mayfly keys revoke a" in refused.stderr


def test_a_node_without_a_key_stays_at_home(state: Path) -> None:
    refused = mayfly("node", "--control-host", "0.0.0.0", "--state-dir", str(state))
    assert refused.exit_code == 1
    assert "others can reach 0.0.0.0" in refused.stderr and "mayfly keys init" in refused.stderr
    assert refused.stdout == "", "before anything is fetched"


def test_a_node_whose_secret_is_none_does_not_start(state: Path) -> None:
    make_pair(state)
    secret_file(state).chmod(0o644)
    refused = mayfly("node", "--state-dir", str(state))
    assert refused.exit_code == 1 and "chmod 600" in refused.stderr


def test_a_node_whose_list_is_broken_does_not_start(state: Path) -> None:
    make_pair(state)
    trusted_file(state).write_text("who?\n")
    refused = mayfly("node", "--state-dir", str(state))
    assert refused.exit_code == 1 and "line 1" in refused.stderr


def test_a_taken_port(state: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        refused = mayfly("node", "--control-port", port, "--state-dir", str(state))
    assert refused.exit_code == 1
    assert f"cannot listen on 127.0.0.1 port {port}" in refused.stderr
    assert "--control-port" in refused.stderr


@pytest.mark.parametrize(
    ("ports", "status", "problem"),
    [
        ("ten", 2, "not a range"),
        ("7799-7710", 2, "smaller"),
        ("7701-7710", 1, "node's own"),
        ("7710", 2, "one more"),
    ],
)
def test_ports_that_cannot_be(state: Path, ports: str, status: int, problem: str) -> None:
    refused = mayfly("node", "--worker-ports", ports, "--state-dir", str(state))
    assert refused.exit_code == status and problem in refused.stderr


@pytest.mark.parametrize(
    ("nodes", "problem"),
    [
        ([], "no node is named"),
        (["mac-2:7700"], "tcp://KEY@HOST:PORT"),
        (["tcp://mac-2.local:7700"], "has no key"),
        ([f"tcp://{'0f' * 32}@mac-2.local:7700"], "this front end has none"),
        (["tcp://secret@mac-2.local:7700"], "not a key"),
    ],
)
def test_nodes_that_no_front_end_can_reach(state: Path, nodes: list[str], problem: str) -> None:
    named = [part for node in nodes for part in ("--node", node)]
    refused = mayfly("front", "--port", "0", "--state-dir", str(state), *named)
    assert refused.exit_code == 1 and problem in refused.stderr
    assert "secret" not in refused.stderr


def test_a_front_end_that_others_can_reach_needs_api_keys(state: Path) -> None:
    refused = mayfly(
        *("front", "--host", "0.0.0.0", "--port", "0"),
        *("--node", "tcp://127.0.0.1:7700", "--state-dir", str(state)),
    )
    assert refused.exit_code == 1 and "--api-keys-file" in refused.stderr


@pytest.mark.process
def test_a_front_end_needs_no_mlx(state: Path) -> None:
    """Nor does anything that it imports."""
    port = free_port()
    code = (
        "import sys\n"
        "for name in ('mlx', 'mlx.core', 'mlx_lm', 'mayfly_worker', 'transformers', 'torch'):\n"
        "    sys.modules[name] = None\n"
        "from mayfly_cli.app import app\n"
        f"app(['front', '--node', 'tcp://127.0.0.1:1', '--port', '{port}',"
        f" '--state-dir', {str(state)!r}])\n"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:

            def alive() -> bool:
                assert process.poll() is None, process.communicate()[1]
                with suppress(httpx.TransportError):
                    return httpx.get(f"http://127.0.0.1:{port}/livez").status_code == 200
                return False

            wait_for(alive, "the front end")
        finally:
            process.terminate()
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors


def test_each_command_takes_what_means_something_to_it() -> None:
    for command, names in COMMANDS.items():
        shown = mayfly(command, "--help").output
        for key in SERVER.values():
            if key.name != "model":
                found = re.search(rf"{key.flag}(?![\w-])", shown)
                assert bool(found) == (key.name in names), (command, key.flag)
