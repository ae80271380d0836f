"""The interface of the system's service managers, and helpers for both."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Protocol

from mayfly_cli.services.description import Scope, Service


class ServiceError(Exception):
    """A service manager that refuses or is missing; the text is its error message."""


@dataclass(frozen=True, slots=True)
class CommandOutput:
    """Exit status and output of a command."""

    code: int
    stdout: str
    stderr: str = ""


RunCommand = Callable[[Sequence[str]], CommandOutput]
"""Runs a command to its end."""


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """State of a service. ``state`` is the manager's own term; ``ended`` describes the end of the
    last run, if there was one; ``problems`` has a sentence for each problem that keeps the service
    from working."""

    installed: bool
    running: bool
    state: str
    pid: int | None = None
    ended: str = ""
    starts: int | None = None
    problems: tuple[str, ...] = ()


class ServiceManager(Protocol):
    """Installs and watches services: launchd or systemd."""

    def files(self, service: Service) -> dict[Path, str]:
        """Returns the text of each file that the service consists of."""

    def install(self, service: Service) -> None:
        """Writes the files, checks them, and starts the service, or restarts it if it runs.

        Raises:
            ServiceError: the files were refused, or the service cannot be started.
        """

    def uninstall(self, name: str, scope: Scope) -> bool:
        """Stops the service and removes its files; returns False if there are none.

        Raises:
            ServiceError: the service cannot be stopped; its files are kept.
        """

    def status(self, name: str, scope: Scope) -> ServiceStatus:
        """Asks the manager for the state of a service. Raises ServiceError."""
        ...


def run(command: Sequence[str]) -> CommandOutput:
    """Runs a command to its end. Raises ServiceError if it does not exist."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise ServiceError(
            f"{command[0]} was not found: this system may have another service manager"
        ) from error
    return CommandOutput(done.returncode, done.stdout, done.stderr)


def run_checked(run: RunCommand, *command: str) -> str:
    """Runs a command and returns its stdout. Raises ServiceError if it fails."""
    done = run(command)
    if done.code:
        message = (done.stderr or done.stdout).strip() or f"exit status {done.code}"
        raise ServiceError(f"{' '.join(command)}: {message}")
    return done.stdout


def write_files(texts: dict[Path, str]) -> None:
    """Writes files, and makes their folders. Raises ServiceError if one cannot be written."""
    for path, text in texts.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            path.chmod(0o644)
        except OSError as error:
            raise ServiceError(f"{path} cannot be written: {error.strerror}") from error


def template(name: str) -> Template:
    """Reads one of this package's templates."""
    return Template((files(__package__) / "templates" / name).read_text(encoding="utf-8"))


def missing_program(command: Sequence[str]) -> tuple[str, ...]:
    """Returns the problem of a service whose program was moved or removed; empty if there is
    none."""
    if command and Path(command[0]).exists():
        return ()
    program = command[0] if command else "its program"
    return (f"{program} is not there any more: install the service again",)
