"""Installation of services, and the output of service managers.

launchd is a fake ``launchctl`` with outputs of the real one's form; no Mac was at hand. systemd's
own tools check its units where they are installed.
"""

from __future__ import annotations

import importlib.util
import os
import plistlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mayfly_cli.services import launchd, systemd
from mayfly_cli.services.description import Service, front_stop_s, node_stop_s
from mayfly_cli.services.manager import CommandOutput, ServiceError, ServiceStatus
from mayfly_reaper.settings import Budgets
from mayfly_server.settings import FrontSettings

DEPLOY = Path(__file__).parents[2] / "deploy"

SERVE = Service("serve", "serve", "user", (sys.executable, "serve"), 38, "Because.")
DAEMON = replace(SERVE, scope="system", user="mayfly")
FRONT = Service(
    *("front", "front", "user", (sys.executable, "-m", "mayfly_server.front"), 18, "Because."),
    listen=("127.0.0.1:8001", "[::1]:8001"),
)

KNOWN_KEYS = {
    "AbandonProcessGroup": bool,
    "ExitTimeOut": int,
    "HardResourceLimits": dict,
    "KeepAlive": bool,
    "Label": str,
    "ProcessType": str,
    "ProgramArguments": list,
    "RunAtLoad": bool,
    "SoftResourceLimits": dict,
    "StandardErrorPath": str,
    "StandardOutPath": str,
    "ThrottleInterval": int,
    "UserName": str,
}
"""Of launchd.plist(5), with their types: launchd ignores a key that it doesn't know."""


class FakeCommands:
    """Stands for the system's commands: remembers those that were run, and answers."""

    def __init__(self, **answers: CommandOutput) -> None:
        self.ran: list[str] = []
        self.answers = answers

    def __call__(self, command: Sequence[str]) -> CommandOutput:
        self.ran.append(" ".join(command))
        return self.answers.get(
            next(filter(self.answers.__contains__, command), ""), CommandOutput(0, "")
        )


# How long a stop may take


@given(st.integers(0, 10**12), st.floats(0, 600))
def test_every_rung_of_the_ladder_fits_into_the_stop(memory: int, grace_s: float) -> None:
    budgets = Budgets(stop_s=grace_s)
    teardown_s = budgets.teardown_s_per_gb * memory / 1e9
    least = grace_s + budgets.leave_s + budgets.terminate_s + budgets.stacks_s + 2 * teardown_s
    assert least < node_stop_s(memory, budgets) < least + 10


def test_a_front_end_may_use_its_whole_grace() -> None:
    settings = FrontSettings((), grace_s=60, notice_s=1)
    assert 63 < front_stop_s(settings) < 70


# launchd


@pytest.mark.parametrize("service", [SERVE, DAEMON])
def test_a_property_list_says_what_launchd_knows(service: Service) -> None:
    awkward = replace(service, command=("/opt/m & m/mayfly", "serve", "--name=<a> \"b\" 'c'"))
    read = plistlib.loads(launchd.render(awkward, Path("/a & b/c.log")).encode())
    assert {key: type(value) for key, value in read.items() if key != "UserName"} == {
        key: kind for key, kind in KNOWN_KEYS.items() if key != "UserName"
    }
    assert read["Label"] == "mayfly.serve"
    assert read["ProgramArguments"] == list(awkward.command)
    assert read["StandardErrorPath"] == "/a & b/c.log"
    assert read["ExitTimeOut"] == service.stop_s
    assert read["KeepAlive"] is True
    assert read.get("UserName") == service.user


RUNNING = """\
gui/501/mayfly.serve = {
	active count = 1
	path = /Users/me/Library/LaunchAgents/mayfly.serve.plist
	type = LaunchAgent
	state = running

	program = /opt/mayfly/bin/mayfly
	arguments = {
		/opt/mayfly/bin/mayfly
		serve
	}

	default environment = {
		PATH => /usr/bin:/bin:/usr/sbin:/sbin
	}

	environment = {
		pid = 7
		XPC_SERVICE_NAME => mayfly.serve
	}

	domain = gui/501 [100005]
	minimum runtime = 10
	exit timeout = 38
	runs = 2
	pid = 4242
	immediate reason = inefficient
	forks = 0
	execs = 1
	last terminating signal = Killed: 9

	spawn type = interactive (4)
	endpoints = {
		last exit code = 0
	}
	properties = keepalive | runatload | inferred program
}
"""
FAILED = """\
system/mayfly.serve = {
	active count = 0
	path = /Library/LaunchDaemons/mayfly.serve.plist
	type = LaunchDaemon
	state = spawn scheduled

	program = /opt/mayfly/bin/mayfly
	runs = 17169
	last exit code = 78: EX_CONFIG
}
"""
NEW = """\
gui/501/mayfly.serve = {
	state = running
	runs = 1
	pid = 52021
	last exit code = (never exited)
}
"""


@pytest.mark.parametrize(
    ("printed", "status"),
    [
        (CommandOutput(0, RUNNING), ServiceStatus(True, True, "running", 4242, "Killed: 9", 2)),
        (
            CommandOutput(0, FAILED),
            ServiceStatus(True, False, "spawn scheduled", None, "exit status 78: EX_CONFIG", 17169),
        ),
        (CommandOutput(0, NEW), ServiceStatus(True, True, "running", 52021, "", 1)),
        (CommandOutput(0, "something else entirely"), ServiceStatus(True, False, "unknown")),
        (
            CommandOutput(113, "", "Could not find service"),
            ServiceStatus(True, False, "not loaded"),
        ),
    ],
)
def test_what_launchctl_prints_is_understood(printed: CommandOutput, status: ServiceStatus) -> None:
    assert launchd.parse(printed) == status


def test_launchctl_that_fails_says_why() -> None:
    with pytest.raises(ServiceError, match="Operation not permitted"):
        launchd.parse(CommandOutput(1, "", "Operation not permitted"))


def test_an_agent_is_installed_and_removed(tmp_path: Path) -> None:
    commands = FakeCommands(print=CommandOutput(113, ""))
    mac = launchd.Launchd(tmp_path, 501, run=commands)
    plist = tmp_path / "Library/LaunchAgents/mayfly.serve.plist"
    assert not mac.status("serve", "user").installed
    mac.install(SERVE)
    assert commands.ran == [
        f"plutil -lint {plist}",
        "launchctl print gui/501/mayfly.serve",
        "launchctl enable gui/501/mayfly.serve",
        f"launchctl bootstrap gui/501 {plist}",
    ]
    commands.answers["print"] = CommandOutput(0, RUNNING)
    assert mac.status("serve", "user") == launchd.parse(CommandOutput(0, RUNNING))
    commands.ran.clear()
    mac.install(SERVE)
    assert "launchctl bootout gui/501/mayfly.serve" in commands.ran, "it is started anew"
    assert mac.uninstall("serve", "user")
    assert not plist.exists()
    assert not mac.uninstall("serve", "user")


def test_a_daemon_writes_to_a_log_of_its_user(tmp_path: Path) -> None:
    owned: list[tuple[Path, str]] = []
    mac = launchd.Launchd(
        tmp_path, 0, tmp_path, FakeCommands(), lambda path, user: owned.append((path, user))
    )
    mac.install(DAEMON)
    plist = tmp_path / "Library/LaunchDaemons/mayfly.serve.plist"
    log = tmp_path / "Library/Logs/Mayfly/serve.log"
    assert plistlib.loads(plist.read_bytes())["StandardErrorPath"] == str(log)
    assert owned == [(log, "mayfly")]
    assert log.exists()


def test_a_property_list_that_is_refused_starts_nothing(tmp_path: Path) -> None:
    commands = FakeCommands(plutil=CommandOutput(1, "mayfly.serve.plist: Unexpected character"))
    with pytest.raises(ServiceError, match="Unexpected character"):
        launchd.Launchd(tmp_path, 501, run=commands).install(SERVE)
    assert len(commands.ran) == 1


@pytest.mark.parametrize("manager", ["launchd", "systemd"])
def test_a_program_that_moved_is_told(tmp_path: Path, manager: str) -> None:
    gone = replace(SERVE, command=("/gone/mayfly", "serve"))
    commands = FakeCommands(print=CommandOutput(0, RUNNING), show=CommandOutput(0, ACTIVE))
    if manager == "launchd":
        mac = launchd.Launchd(tmp_path, 501, run=commands)
        mac.install(gone)
        status = mac.status("serve", "user")
    else:
        linux = systemd.Systemd(tmp_path, run=commands)
        linux.install(gone)
        status = linux.status("serve", "user")
    assert status.running
    assert status.problems == ("/gone/mayfly is not there any more: install the service again",)


# systemd

ACTIVE = """\
MainPID=4242
Result=success
ExecMainStatus=0
NRestarts=2
LoadState=loaded
ActiveState=active
SubState=running
"""
RESTARTING = """\
MainPID=0
Result=exit-code
ExecMainStatus=1
NRestarts=5
LoadState=loaded
ActiveState=activating
SubState=auto-restart
"""


@pytest.mark.parametrize(
    ("shown", "status"),
    [
        (ACTIVE, ServiceStatus(True, True, "active (running)", 4242, "", 3)),
        (
            RESTARTING,
            ServiceStatus(True, False, "activating (auto-restart)", None, "exit-code, status 1"),
        ),
        ("LoadState=not-found\n", ServiceStatus(False, False, "not installed")),
        (
            "LoadState=bad-setting\nActiveState=inactive\nSubState=dead\nMainPID=0\n",
            ServiceStatus(
                *(True, False, "inactive (dead)"),
                problems=("systemd could not load it: bad-setting",),
            ),
        ),
    ],
)
def test_what_systemctl_shows_is_understood(shown: str, status: ServiceStatus) -> None:
    assert systemd.parse(shown) == status


@pytest.mark.parametrize(
    ("argument", "written"),
    [
        ("/opt/mayfly/bin/mayfly", "/opt/mayfly/bin/mayfly"),
        ("a b", '"a b"'),
        ("100%", '"100%%"'),
        ("$HOME", '"$$HOME"'),
        ('say "it"', '"say \\"it\\""'),
        ("back\\slash", '"back\\\\slash"'),
        ("", '""'),
    ],
)
def test_arguments_are_quoted_for_systemd(argument: str, written: str) -> None:
    assert systemd.quoted(argument) == written


def test_units_are_installed_and_removed(tmp_path: Path) -> None:
    commands = FakeCommands()
    linux = systemd.Systemd(tmp_path, run=commands)
    linux.install(FRONT)
    assert commands.ran[-4:] == [
        "systemctl --user daemon-reload",
        "systemctl --user enable mayfly-front.service mayfly-front.socket",
        "systemctl --user stop mayfly-front.service",
        "systemctl --user restart mayfly-front.socket mayfly-front.service",
    ]
    socket = (tmp_path / "mayfly-front.socket").read_text()
    assert "ListenStream=127.0.0.1:8001\nListenStream=[::1]:8001\n" in socket
    commands.ran.clear()
    assert linux.uninstall("front", "user")
    assert list(tmp_path.iterdir()) == []
    assert commands.ran == [
        "systemctl --user disable --now mayfly-front.socket mayfly-front.service",
        "systemctl --user daemon-reload",
    ]
    assert not linux.uninstall("front", "user")


def test_nothing_is_left_where_systemd_does_not_answer(tmp_path: Path) -> None:
    units = tmp_path / "units"
    absent = FakeCommands(show=CommandOutput(1, "", "Failed to connect to bus: No medium found"))
    with pytest.raises(ServiceError, match=r"(?s)No medium found.*Nothing was installed.*--print"):
        systemd.Systemd(units, run=absent).install(SERVE)
    assert not units.exists()


def test_a_unit_that_cannot_be_stopped_stays(tmp_path: Path) -> None:
    linux = systemd.Systemd(
        tmp_path, run=FakeCommands(disable=CommandOutput(1, "", "Access denied"))
    )
    linux.install(SERVE)
    with pytest.raises(ServiceError, match=r"disable --now mayfly-serve\.service: Access denied"):
        linux.uninstall("serve", "user")
    assert (tmp_path / "mayfly-serve.service").exists()


def test_a_node_keeps_its_gpu_and_its_workers() -> None:
    """The unit has no hardening that hides the GPU or forbids generated code, and a stop or an OOM
    kill leaves the workers to the reaper."""
    unit = systemd.render(replace(SERVE, scope="system", user="mayfly"))["mayfly-serve.service"]
    settings = dict(line.partition("=")[::2] for line in unit.splitlines() if line[:1].isupper())
    assert not {"PrivateDevices", "DeviceAllow", "DevicePolicy", "ProtectClock"} & settings.keys()
    assert "MemoryDenyWriteExecute" not in settings
    assert settings["KillMode"] == "process"
    assert settings["OOMPolicy"] == "continue"


needs_systemd_analyze = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is missing"
)


@pytest.mark.process
@pytest.mark.parametrize("scope", ["user", "system"])
@pytest.mark.parametrize("service", [SERVE, FRONT])
@needs_systemd_analyze
def test_systemd_verifies_the_units(tmp_path: Path, service: Service, scope: str) -> None:
    for name, text in systemd.render(_in_scope(service, scope)).items():
        (tmp_path / name).write_text(text)
        assert "\n\n\n" not in text
    paths = [str(path) for path in sorted(tmp_path.iterdir())]
    # --man=no: an image without man pages is no fault of the units.
    command = ["systemd-analyze", "--man=no", f"--{scope}", "verify", *paths]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}  # as a session has it
    checked = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    complaints = [line for line in checked.stderr.splitlines() if str(tmp_path) in line]
    assert (checked.returncode, complaints) == (0, []), checked.stderr


@pytest.mark.process
@pytest.mark.parametrize(("service", "exposure"), [(SERVE, 60), (FRONT, 25)])
@needs_systemd_analyze
def test_the_units_leave_little_exposed(tmp_path: Path, service: Service, exposure: int) -> None:
    """systemd's own exposure score, of 100: a unit without any hardening has 96."""
    for name, text in systemd.render(_in_scope(service, "system")).items():
        (tmp_path / name).write_text(text)
    unit = tmp_path / f"mayfly-{service.name}.service"
    judged = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", f"--threshold={exposure}", str(unit)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert judged.returncode == 0, judged.stdout + judged.stderr


def _in_scope(service: Service, scope: str) -> Service:
    if scope == "user":
        return service
    return replace(service, scope="system", user="daemon")


# The examples for people


def test_the_examples_are_what_would_be_installed() -> None:
    spec = importlib.util.spec_from_file_location("render", DEPLOY / "render.py")
    assert spec is not None and spec.loader is not None
    render = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(render)
    for path, text in render.texts().items():
        assert path.read_text() == text, f"run: python {DEPLOY / 'render.py'}"
