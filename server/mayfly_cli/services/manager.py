"""The interface to the operating system's service managers (launchd and systemd), and functions
that both implementations use."""

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
    """The service manager failed or is not installed, or a service's file cannot be used. The text
    tells the operator why."""


@dataclass(frozen=True, slots=True)
class CommandOutput:
    """Exit status and output of a command that has ended."""

    code: int
    stdout: str
    stderr: str = ""


RunCommand = Callable[[Sequence[str]], CommandOutput]
"""Function that runs a command to its end and returns its output."""


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """The state of a service.

    Attributes:
        state: the state in the service manager's own words.
        ended: the reason why the service's last process ended; empty if it is not known.
        starts: the number of times that the service was started, if it is known.
        problems: a sentence for each problem that keeps the service from working.
    """

    installed: bool
    running: bool
    state: str
    pid: int | None = None
    ended: str = ""
    starts: int | None = None
    problems: tuple[str, ...] = ()


class ServiceManager(Protocol):
    """Interface to a service manager (launchd or systemd), to install services and see their
    state."""

    def files(self, service: Service) -> dict[Path, str]:
        """Returns the texts of the files that define the service, by their paths."""

    def install(self, service: Service) -> None:
        """Writes the service's files, checks them, and starts the service, or restarts it if it
        runs.

        Raises:
            ServiceError: the files were refused, or the service cannot be started.
        """

    def uninstall(self, name: str, scope: Scope) -> bool:
        """Stops the service and removes its files; returns False if there are none.

        Raises:
            ServiceError: the service cannot be stopped; its files are kept.
        """

    def status(self, name: str, scope: Scope) -> ServiceStatus:
        """Asks the manager for the state of a service. Raises ServiceError if the manager cannot
        tell."""
        ...


def run(command: Sequence[str]) -> CommandOutput:
    """Runs a command to its end. Raises ServiceError if there is no such command."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise ServiceError(
            f"{command[0]} was not found: this system may have another service manager"
        ) from error
    return CommandOutput(done.returncode, done.stdout, done.stderr)


def run_checked(run: RunCommand, *command: str) -> str:
    """Runs a command and returns its stdout. Raises ServiceError if its exit status is not 0."""
    done = run(command)
    if done.code:
        message = (done.stderr or done.stdout).strip() or f"exit status {done.code}"
        raise ServiceError(f"{' '.join(command)}: {message}")
    return done.stdout


def write_files(texts: dict[Path, str]) -> None:
    """Writes texts to files, and makes missing folders. Raises ServiceError if a file cannot be
    written."""
    for path, text in texts.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            path.chmod(0o644)
        except OSError as error:
            raise ServiceError(f"{path} cannot be written: {error.strerror}") from error


def template(name: str) -> Template:
    """Reads a template of a service's file from this package's folder ``templates``."""
    return Template((files(__package__) / "templates" / name).read_text(encoding="utf-8"))


def missing_program(command: Sequence[str]) -> tuple[str, ...]:
    """Returns a sentence if the program of a service's ``command`` does not exist any more;
    otherwise an empty tuple."""
    if command and Path(command[0]).exists():
        return ()
    program = command[0] if command else "its program"
    return (f"{program} is not there any more: install the service again",)
