"""What the system's service managers have in common."""

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
    """The service manager refuses, or is not there. The text says what it said."""


@dataclass(frozen=True, slots=True)
class Output:
    """What a command left."""

    code: int
    stdout: str
    stderr: str = ""


Run = Callable[[Sequence[str]], Output]


@dataclass(frozen=True, slots=True)
class Status:
    """``state`` is the manager's own word for it; ``ended`` how the last run ended, if one did;
    ``wrong`` holds a sentence for each thing that keeps the service from working."""

    installed: bool
    running: bool
    state: str
    pid: int | None = None
    ended: str = ""
    starts: int | None = None
    wrong: tuple[str, ...] = ()


class Manager(Protocol):
    def files(self, service: Service) -> dict[Path, str]:
        """What the service is installed by."""

    def install(self, service: Service) -> None:
        """Writes the files, has them checked, and starts the service, anew if it ran.

        Raises:
            ServiceError: they were refused, or the service cannot be started.
        """

    def uninstall(self, name: str, scope: Scope) -> bool:
        """Stops the service and removes its files; False where there are none.

        Raises:
            ServiceError: it cannot be stopped; its files are still there.
        """

    def status(self, name: str, scope: Scope) -> Status: ...


def run(command: Sequence[str]) -> Output:
    """Raises ServiceError where there is no such command."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise ServiceError(
            f"{command[0]} is not there: has this system no such service manager?"
        ) from error
    return Output(done.returncode, done.stdout, done.stderr)


def require(run: Run, *command: str) -> str:
    """The command's stdout. Raises ServiceError if it fails."""
    done = run(command)
    if done.code:
        said = (done.stderr or done.stdout).strip() or f"exit status {done.code}"
        raise ServiceError(f"{' '.join(command)}: {said}")
    return done.stdout


def write(texts: dict[Path, str]) -> None:
    """Raises ServiceError for a path that can't be written to."""
    for path, text in texts.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            path.chmod(0o644)
        except OSError as error:
            raise ServiceError(f"{path} cannot be written: {error.strerror}") from error


def template(name: str) -> Template:
    return Template((files(__package__) / "templates" / name).read_text(encoding="utf-8"))


def missing_program(command: Sequence[str]) -> tuple[str, ...]:
    """What is wrong with a command that is to be started: it moved, or was removed."""
    if command and Path(command[0]).exists():
        return ()
    program = command[0] if command else "its program"
    return (f"{program} is not there any more: install the service again",)
