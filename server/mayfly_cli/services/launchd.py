"""Services under macOS's launchd, managed by ``launchctl`` and property list files.

A service of the user is a LaunchAgent (domain ``gui/UID``), a service of the system is a
LaunchDaemon. ``launchctl print`` shows a service's state in a format that Apple may change, so
fields that cannot be read are left out.
"""

from __future__ import annotations

import os
import plistlib
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from mayfly_cli.services.description import Scope, Service
from mayfly_cli.services.manager import (
    CommandOutput,
    RunCommand,
    ServiceError,
    ServiceStatus,
    missing_program,
    run,
    run_checked,
    template,
    write_files,
)

PREFIX = "mayfly."
_NO_SUCH_SERVICE = (3, 113)  # of launchctl print, older and newer
_FIELD = re.compile(r"^\t(?P<key>[a-z][a-z ]*) = (?P<value>[^{].*)$", re.MULTILINE)
"""A line ``key = value`` of ``launchctl print``. Lines with one tab before them describe the
service; lines with more tabs describe its endpoints or environment and do not match."""


def render(service: Service, log: Path) -> str:
    """Returns the text of a service's property list, with comments that explain the values."""
    user = ""
    if service.scope == "system" and service.user is not None:
        user = f"\n    <key>UserName</key>\n    <string>{escape(service.user)}</string>"
    arguments = [f"        <string>{escape(argument)}</string>" for argument in service.command]
    return template("launchd.plist").substitute(
        label=escape(PREFIX + service.name),
        user=user,
        arguments="\n".join(arguments),
        stop_s=service.stop_s,
        stop_reason=service.stop_reason,
        log=escape(str(log)),
    )


def parse(printed: CommandOutput) -> ServiceStatus:
    """Reads a service's state from the output of ``launchctl print``, which is asked only if the
    service's file exists. Raises ServiceError if the command failed for another reason than that no
    such service is loaded."""
    if printed.code in _NO_SUCH_SERVICE:
        return ServiceStatus(installed=True, running=False, state="not loaded")
    if printed.code:
        raise ServiceError(f"launchctl print: {printed.stderr.strip() or printed.code}")
    fields: dict[str, str] = {}
    for field in _FIELD.finditer(printed.stdout):
        fields.setdefault(field["key"], field["value"].strip())
    pid = fields.get("pid", "")
    return ServiceStatus(
        installed=True,
        running=pid.isdecimal(),
        state=fields.get("state", "unknown"),
        pid=int(pid) if pid.isdecimal() else None,
        ended=_ended(fields),
        starts=int(fields["runs"]) if fields.get("runs", "").isdecimal() else None,
    )


def _ended(fields: Mapping[str, str]) -> str:
    if signal := fields.get("last terminating signal"):
        return signal
    if reason := fields.get("last exit reason"):
        return reason
    code = fields.get("last exit code", "")
    return f"exit status {code}" if code[:1].isdecimal() else ""


@dataclass(frozen=True, slots=True)
class Launchd:
    """Installs, removes and inspects services under macOS's launchd (:class:`ServiceManager`).

    ``root`` is the folder that holds the system's ``Library``; ``own`` makes a user the owner of a
    log file. Tests replace both.
    """

    home: Path
    uid: int
    root: Path = Path("/")
    run: RunCommand = run
    own: Callable[[Path, str], None] = lambda path, user: shutil.chown(path, user)

    def files(self, service: Service) -> dict[Path, str]:
        log = self._logs(service.scope) / f"{service.name}.log"
        return {self._plist(service.name, service.scope): render(service, log)}

    def install(self, service: Service) -> None:
        [path] = files = self.files(service)
        write_files(files)
        run_checked(self.run, "plutil", "-lint", str(path))
        self._make_logs(service)
        target = self._target(service.name, service.scope)
        self._bootout(target)
        run_checked(self.run, "launchctl", "enable", target)
        run_checked(self.run, "launchctl", "bootstrap", self._domain(service.scope), str(path))

    def uninstall(self, name: str, scope: Scope) -> bool:
        path = self._plist(name, scope)
        if not path.exists():
            return False
        self._bootout(self._target(name, scope))
        path.unlink()
        return True

    def status(self, name: str, scope: Scope) -> ServiceStatus:
        path = self._plist(name, scope)
        if not path.exists():
            return ServiceStatus(installed=False, running=False, state="not installed")
        status = parse(self.run(("launchctl", "print", self._target(name, scope))))
        try:
            problems = missing_program(
                plistlib.loads(path.read_bytes()).get("ProgramArguments", ())
            )
        except plistlib.InvalidFileException as error:
            raise ServiceError(f"{path} is not a property list: {error}") from error
        return ServiceStatus(
            installed=True,
            running=status.running,
            state=status.state,
            pid=status.pid,
            ended=status.ended,
            starts=status.starts,
            problems=problems,
        )

    def _make_logs(self, service: Service) -> None:
        """Creates the service's log file. The file has to belong to the service's user, otherwise
        launchd ends the service with EX_CONFIG."""
        folder = self._logs(service.scope)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            log = folder / f"{service.name}.log"
            log.touch(mode=0o640)
            if service.scope == "system" and service.user is not None:
                self.own(log, service.user)
        except (OSError, LookupError) as error:
            raise ServiceError(f"{folder} cannot be used for logs: {error}") from error

    def _bootout(self, target: str) -> None:
        """Stops the service if it is loaded. Returns when the service has ended, or when the time
        that launchd gives it to end (``ExitTimeOut``) is over."""
        if self.run(("launchctl", "print", target)).code == 0:
            run_checked(self.run, "launchctl", "bootout", target)

    def _plist(self, name: str, scope: Scope) -> Path:
        folder = (
            self.root / "Library/LaunchDaemons"
            if scope == "system"
            else self.home / "Library/LaunchAgents"
        )
        return folder / f"{PREFIX}{name}.plist"

    def _logs(self, scope: Scope) -> Path:
        base = self.root if scope == "system" else self.home
        return base / "Library/Logs/Mayfly"

    def _domain(self, scope: Scope) -> str:
        return "system" if scope == "system" else f"gui/{self.uid}"

    def _target(self, name: str, scope: Scope) -> str:
        return f"{self._domain(scope)}/{PREFIX}{name}"


def make_launchd() -> Launchd:
    """Makes the manager for launchd on this machine, with this user's home folder and id."""
    return Launchd(Path.home(), os.getuid())
