"""``mayfly service``, with a service manager that only records."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from mayfly_cli.app import app
from mayfly_cli.commands import service
from mayfly_cli.services.description import Service
from mayfly_cli.services.manager import ServiceError, ServiceStatus

NOT_INSTALLED = ServiceStatus(False, False, "not installed")


@dataclass
class RecordingManager:
    """A manager that does nothing and remembers what it was to install."""

    found: ServiceStatus = NOT_INSTALLED
    installed: Service | None = None
    refuses: bool = False

    def files(self, service: Service) -> dict[Path, str]:
        return {Path("/units") / service.name: "text"}

    def install(self, service: Service) -> None:
        if self.refuses:
            raise ServiceError("launchctl: no")
        self.installed = service

    def uninstall(self, name: str, scope: str) -> bool:
        return self.found.installed

    def status(self, name: str, scope: str) -> ServiceStatus:
        return self.found


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> RecordingManager:
    recorder = RecordingManager()
    monkeypatch.setattr(service, "_manager", lambda: recorder)
    return recorder


def mayfly(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["service", *map(str, arguments)])


def test_a_server_is_installed(
    manager: RecordingManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mayfly.toml").touch()
    monkeypatch.chdir(tmp_path)
    result = mayfly("install", "serve", "--", "--config", "mayfly.toml", "--port", 9000)
    assert result.exit_code == 0, result.output
    assert "wrote /units/serve" in result.stdout
    assert manager.installed is not None
    program, *arguments = manager.installed.command
    assert Path(program).is_absolute()
    config = str(tmp_path / "mayfly.toml")  # a service starts in another folder
    assert arguments[-5:] == ["serve", "--config", config, "--port", "9000"]
    assert manager.installed.stop_s > 20


@pytest.mark.parametrize(("platform", "bound"), [("linux", False), ("darwin", True)])
def test_a_front_end_is_told_where_to_listen(
    manager: RecordingManager, monkeypatch: pytest.MonkeyPatch, platform: str, bound: bool
) -> None:
    """On Linux systemd binds, on macOS it does so itself."""
    monkeypatch.setattr(sys, "platform", platform)
    node = ("--node", "tcp://mac-1.local:7700")
    assert mayfly("install", "front", "--listen", "[::1]:8001", "--", *node).exit_code == 0
    assert manager.installed is not None
    assert manager.installed.listen == ("[::1]:8001",)
    binds = ["--host", "::1", "--port", "8001"] if bound else []
    assert list(manager.installed.command[-2 - len(binds) :]) == [*node, *binds]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("install", "nonsense"), 2, "nonsense"),
        (("install", "serve", "--listen", "127.0.0.1:1"), 2, "--listen is for a front end"),
        (("install", "front", "--listen", "8001"), 2, "ADDRESS:PORT"),
        (("install", "front", "--listen", "::1:99999"), 2, "ADDRESS:PORT"),
        (("install", "serve", "--name", "A b"), 2, "cannot name a service"),
        (("install", "serve", "--system", "--print", "--user", "no-such-user"), 1, "no user"),
        (("install", "serve", "--system", "--print", "--user", "root"), 1, "not run as root"),
        (("uninstall", "serve"), 1, "no service serve is installed"),
    ],
)
def test_what_makes_no_sense_is_refused(
    manager: RecordingManager, arguments: tuple[str, ...], code: int, says: str
) -> None:
    result = mayfly(*arguments)
    assert result.exit_code == code
    assert says in result.stderr
    assert manager.installed is None


def test_a_manager_that_refuses_is_quoted(manager: RecordingManager) -> None:
    manager.refuses = True
    result = mayfly("install", "serve")
    assert (result.exit_code, result.stderr) == (1, "mayfly: launchctl: no\n")


def test_status_says_how_it_is(manager: RecordingManager) -> None:
    assert mayfly("status").exit_code == 1
    manager.found = ServiceStatus(True, True, "active (running)", 7, "signal", 2, ("it moved",))
    result = mayfly("status")
    assert result.exit_code == 0
    assert result.stdout == (
        "serve: active (running), pid 7, started 2 times, the last run ended: signal\n"
    )
    assert result.stderr == "it moved\n"


def test_the_files_can_be_looked_at_first() -> None:
    result = mayfly("install", "front", "--print")
    assert result.exit_code == 0
    assert ("ListenStream=" in result.stdout) == (sys.platform != "darwin")
