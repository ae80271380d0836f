"""Services under systemd, managed by ``systemctl`` and unit files.

A front end has two units, a service and a socket: systemd keeps the listening socket open, so that
no client is refused while the front end's process is replaced.
"""

from __future__ import annotations

import re
import shlex
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import platformdirs

from mayfly_cli.services.description import Scope, Service
from mayfly_cli.services.manager import (
    RunCommand,
    ServiceError,
    ServiceStatus,
    missing_program,
    run,
    run_checked,
    template,
    write_files,
)

PREFIX = "mayfly-"
_SAFE = re.compile(r"[\w@+=:,./-]+")
_PROPERTIES = "LoadState,ActiveState,SubState,MainPID,Result,ExecMainStatus,NRestarts"
_TARGETS = {"system": "multi-user.target", "user": "default.target"}


def quoted(argument: str) -> str:
    """Quotes an argument for ``ExecStart=`` in a unit file. ``%`` and ``$`` are doubled, because
    systemd expands them even within quotes."""
    argument = argument.replace("%", "%%").replace("$", "$$")
    if _SAFE.fullmatch(argument):
        return argument
    escaped = argument.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def render(service: Service) -> dict[str, str]:
    """Returns the texts of a service's unit files, by their names."""
    kind = "front" if service.role == "front" else "node"
    name = PREFIX + service.name
    system = service.scope == "system"
    # Hardening takes rights from root, and hides files by namespaces that a user's manager may not
    # have.
    hardening = template(f"{kind}.hardening").template.rstrip() if system else ""
    unit = template(f"{kind}.service").substitute(
        name=name,
        command=" ".join(map(quoted, service.command)),
        user=f"User={service.user}" if system and service.user else "",
        stop_s=service.stop_s,
        stop_reason=service.stop_reason,
        hardening=hardening,
        target=_TARGETS[service.scope],
    )
    units = {f"{name}.service": _without_gaps(unit)}
    if kind == "front":
        listen = "\n".join(f"ListenStream={address}" for address in service.listen)
        units[f"{name}.socket"] = template("front.socket").substitute(name=name, listen=listen)
    return units


def _without_gaps(unit: str) -> str:
    """Removes from a unit's text the blank lines that empty template fields left."""
    return re.sub(r"\n(?=\n(?!\[|#|\n))", "", unit)


def parse(shown: str) -> ServiceStatus:
    """Reads a service's state from the output of ``systemctl show``."""
    fields = dict(line.partition("=")[::2] for line in shown.splitlines())
    if fields.get("LoadState") == "not-found":
        return ServiceStatus(installed=False, running=False, state="not installed")
    pid = int(fields.get("MainPID") or 0) or None
    state = f"{fields.get('ActiveState', 'unknown')} ({fields.get('SubState', 'unknown')})"
    result = fields.get("Result", "success")
    ended = "" if result == "success" else f"{result}, status {fields.get('ExecMainStatus')}"
    problems = (
        ()
        if fields.get("LoadState") == "loaded"
        else (f"systemd could not load it: {fields.get('LoadState')}",)
    )
    return ServiceStatus(
        installed=True,
        running=fields.get("ActiveState") == "active" and pid is not None,
        state=state,
        pid=pid,
        ended=ended,
        starts=int(fields.get("NRestarts") or 0) + 1 if pid else None,
        problems=problems,
    )


@dataclass(frozen=True, slots=True)
class Systemd:
    """The :class:`ServiceManager` for systemd. ``user_units`` and ``system_units`` are the folders
    for unit files."""

    user_units: Path
    system_units: Path = Path("/etc/systemd/system")
    run: RunCommand = run

    def files(self, service: Service) -> dict[Path, str]:
        folder = self._folder(service.scope)
        return {folder / name: text for name, text in render(service).items()}

    def install(self, service: Service) -> None:
        files = self.files(service)
        self._require_manager(service.scope)
        write_files(files)
        if shutil.which("systemd-analyze") is not None:
            scope = ("--user",) if service.scope == "user" else ()
            run_checked(self.run, "systemd-analyze", *scope, "verify", *map(str, files))
        self._systemctl(service.scope, "daemon-reload")
        units = [path.name for path in files]
        self._systemctl(service.scope, "enable", *units)
        # A socket unit cannot be restarted while its service runs: the service is stopped first.
        self._systemctl(service.scope, "stop", f"{PREFIX}{service.name}.service")
        self._systemctl(service.scope, "restart", *sorted(units, reverse=True))

    def uninstall(self, name: str, scope: Scope) -> bool:
        paths = [self._folder(scope) / f"{PREFIX}{name}.{kind}" for kind in ("socket", "service")]
        existing = [path for path in paths if path.exists()]
        if not existing:
            return False
        self._systemctl(scope, "disable", "--now", *(path.name for path in existing))
        for path in existing:
            path.unlink()
        self._systemctl(scope, "daemon-reload")
        return True

    def status(self, name: str, scope: Scope) -> ServiceStatus:
        path = self._folder(scope) / f"{PREFIX}{name}.service"
        if not path.exists():
            return ServiceStatus(installed=False, running=False, state="not installed")
        shown = self._systemctl(scope, "show", path.name, f"--property={_PROPERTIES}")
        status = parse(shown)
        return replace(status, problems=status.problems + missing_program(_command(path)))

    def _require_manager(self, scope: Scope) -> None:
        """Raises ServiceError if systemd does not answer. Called before unit files are written."""
        try:
            self._systemctl(scope, "show", "--property=Version")
        except ServiceError as error:
            raise ServiceError(
                f"{error}\nNothing was installed, since systemd does not answer. --print shows "
                "the units."
            ) from error

    def _systemctl(self, scope: Scope, *arguments: str) -> str:
        of = ("--user",) if scope == "user" else ()
        return run_checked(self.run, "systemctl", *of, *arguments)

    def _folder(self, scope: Scope) -> Path:
        return self.system_units if scope == "system" else self.user_units


def _command(unit: Path) -> list[str]:
    found = re.search(r"^ExecStart=(.*)$", unit.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise ServiceError(f"{unit} has no ExecStart")
    return [word.replace("%%", "%").replace("$$", "$") for word in shlex.split(found[1])]


def make_systemd() -> Systemd:
    """Makes the manager for systemd's units of this user and of the system."""
    return Systemd(platformdirs.user_config_path() / "systemd" / "user")
