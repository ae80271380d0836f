"""``mayfly service``: runs Mayfly as a service, under launchd on macOS or systemd on Linux."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mayfly_cli.failure import fail

if TYPE_CHECKING:
    from mayfly_cli.services.description import Scope, Service
    from mayfly_cli.services.manager import ServiceManager

app = typer.Typer(name="service", no_args_is_help=True)

NAME = r"[a-z0-9][a-z0-9-]{0,40}"
DEFAULT_LISTEN = "127.0.0.1:8000"


class ServiceCommand(StrEnum):
    """A ``mayfly`` subcommand that a service can run."""

    serve = "serve"
    node = "node"
    front = "front"


Name = Annotated[str, typer.Argument(help="The service's name, as given to `install`.")]
System = Annotated[
    bool,
    typer.Option("--system", help="A service of the system instead of this user's; needs root."),
]


@app.callback()
def service() -> None:
    """Run Mayfly as a service of this machine: under launchd on macOS, under systemd on Linux."""


@app.command()
def install(
    what: Annotated[ServiceCommand, typer.Argument(help="The command that the service runs.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="Arguments of that command, after a `--`.", metavar="-- ..."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The service's name; by default that of the command.")
    ] = None,
    system: System = False,
    user: Annotated[
        str | None,
        typer.Option(help="The user that a service of the system runs as; by default you."),
    ] = None,
    listen: Annotated[
        list[str] | None,
        typer.Option(help="ADDRESS:PORT that a front end serves on; on Linux may be repeated."),
    ] = None,
    stop_timeout: Annotated[
        int | None,
        typer.Option(
            help="Seconds from SIGTERM to SIGKILL; by default enough for a model that fills this "
            "machine's memory.",
            min=1,
        ),
    ] = None,
    show: Annotated[
        bool, typer.Option("--print", help="Print the files instead of installing them.")
    ] = False,
) -> None:
    """Write a service's files, check them, and start it, now and whenever the machine starts.

    Under a service manager, `mayfly drain` is a restart that loses no request.
    """
    from mayfly_cli.services.manager import ServiceError

    called = _name(name or what.value)
    scope = _scope(system, must_be_root=not show)
    described = _described(
        what, _absolute(arguments or []), called, scope, user, listen or [], stop_timeout
    )
    manager = _manager()
    if show:
        for path, text in manager.files(described).items():
            typer.echo(f"# {path}\n{text}")
        return
    try:
        manager.install(described)
    except ServiceError as error:
        fail(str(error))
    for path in manager.files(described):
        typer.echo(f"wrote {path}")
    flag = " --system" if system else ""
    typer.echo(f"started; `mayfly service status {called}{flag}` shows its state")


@app.command()
def uninstall(name: Name = "serve", system: System = False) -> None:
    """Stop a service, so that it can finish its requests, and remove its files."""
    from mayfly_cli.services.manager import ServiceError

    try:
        removed = _manager().uninstall(_name(name), _scope(system))
    except ServiceError as error:
        fail(str(error))
    if not removed:
        fail(f"no service {name} is installed")
    typer.echo(f"{name} is stopped and removed")


@app.command()
def status(name: Name = "serve", system: System = False) -> None:
    """Show the state of a service, and its problems. Exit code 1 if it does not run."""
    from mayfly_cli.services.manager import ServiceError

    try:
        found = _manager().status(_name(name), "system" if system else "user")
    except ServiceError as error:
        fail(str(error))
    details = [f"pid {found.pid}"] if found.pid else []
    details += [f"started {found.starts} times"] if found.starts else []
    details += [f"the last run ended: {found.ended}"] if found.ended else []
    typer.echo(f"{name}: {', '.join([found.state, *details])}")
    for problem in found.problems:
        typer.secho(problem, err=True)
    if not found.running:
        raise typer.Exit(1)


def _described(
    what: ServiceCommand,
    arguments: list[str],
    name: str,
    scope: Scope,
    user: str | None,
    listen: list[str],
    stop_timeout: int | None,
) -> Service:
    from mayfly_cli.services.description import Service

    front = what is ServiceCommand.front
    if listen and not front:
        raise typer.BadParameter(
            "--listen is for a front end; the other commands take --host and --port"
        )
    addresses = [_address(each) for each in listen or [DEFAULT_LISTEN]] if front else []
    if front and sys.platform == "darwin":
        if len(addresses) > 1:
            raise typer.BadParameter("on macOS a front end has one --listen")
        host, port = addresses[0]
        arguments = [*arguments, "--host", host.strip("[]"), "--port", port]
    stop_s, reason = _stop(front)
    if stop_timeout is not None:
        stop_s, reason = stop_timeout, "Given when the service was installed."
    return Service(
        name=name,
        role=what.value,
        scope=scope,
        command=(*_program(), what.value, *arguments),
        stop_s=stop_s,
        stop_reason=reason,
        user=_user(user) if scope == "system" else None,
        listen=tuple(f"{host}:{port}" for host, port in addresses),
    )


def _stop(front: bool) -> tuple[int, str]:
    """Returns the seconds that a service needs from SIGTERM to SIGKILL, and a sentence with the
    reason. ``front`` is True for a service that runs a front end."""
    from mayfly_cli.services.description import front_stop_s, node_stop_s
    from mayfly_reaper.settings import Budgets
    from mayfly_server.settings import FrontSettings

    if front:
        return front_stop_s(
            FrontSettings(())
        ), "A front end has no model to unload: its streams take longest."
    import psutil

    memory: int = psutil.virtual_memory().total
    return (
        node_stop_s(memory, Budgets()),
        f"Enough for a model that fills the {memory / 1e9:.0f} GB here; raise it with stop_grace.",
    )


def _program() -> tuple[str, ...]:
    """Returns the absolute command that runs ``mayfly`` by this Python, because a service manager
    has another PATH."""
    script = Path(sys.executable).with_name("mayfly")
    return (str(script),) if script.exists() else (sys.executable, "-m", "mayfly_cli")


def _absolute(arguments: Sequence[str]) -> list[str]:
    """Makes arguments (and values after ``=``) that are paths of existing files absolute, since a
    service starts in another folder."""

    def resolved(argument: str) -> str:
        option, is_set, value = argument.rpartition("=")
        if value and not value.startswith("-") and Path(value).exists():
            return f"{option}{is_set}{Path(value).absolute()}"
        return argument

    return [resolved(argument) for argument in arguments]


def _address(text: str) -> tuple[str, str]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise typer.BadParameter(f"--listen {text}: should be ADDRESS:PORT, as in {DEFAULT_LISTEN}")
    return host, port


def _name(name: str) -> str:
    import re

    if not re.fullmatch(NAME, name):
        raise typer.BadParameter(f"{name!r} cannot name a service: use a-z, 0-9 and -")
    return name


def _scope(system: bool, *, must_be_root: bool = True) -> Scope:
    import os

    if system and must_be_root and os.geteuid() != 0:
        fail("a service of the system needs root: run this with sudo")
    return "system" if system else "user"


def _user(given: str | None) -> str:
    """Returns the user that a service of the system runs as: the given one, or the user who called
    sudo. Ends the command if that is root, since no part of Mayfly needs root's rights."""
    import os
    import pwd

    user = given or os.environ.get("SUDO_USER") or pwd.getpwuid(os.getuid()).pw_name
    try:
        entry = pwd.getpwnam(user)
    except KeyError:
        fail(f"there is no user {user} here; --user names another user")
    if entry.pw_uid == 0:
        fail("a service does not run as root; --user names another user")
    return user


def _manager() -> ServiceManager:
    if sys.platform == "darwin":
        from mayfly_cli.services import launchd

        return launchd.make_launchd()
    from mayfly_cli.services import systemd

    return systemd.make_systemd()
