"""``mayfly quarantine``: the requests that are refused because workers died of them."""

from __future__ import annotations

from typing import Annotated

import typer

from mayfly_server.cli.control import StateDir, ask, state_directory, tell

app = typer.Typer(
    name="quarantine",
    help="See and release requests that are refused because workers died of them.",
    no_args_is_help=True,
)


@app.command("list")
def entries(
    state_dir: StateDir = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
) -> None:
    """Show what is refused, what workers died of, and for how long it will be.

    A request is known by a fingerprint: a hash of its model, its prompt and its parameters.
    """
    found = ask(state_directory(state_dir)).quarantined
    if json:
        from dataclasses import asdict
        from json import dumps

        typer.echo(dumps([asdict(entry) for entry in found], indent=2))
        return
    for entry in found:
        typer.echo(f"{entry.fingerprint}  {entry.kind}  {_time(entry.left_s)} left")
    if not found:
        typer.echo("nothing is in quarantine")


@app.command()
def clear(
    fingerprint: Annotated[
        str, typer.Argument(help="Its fingerprint, or how that begins; everything by default.")
    ] = "",
    state_dir: StateDir = None,
) -> None:
    """Take such requests again."""
    from mayfly_protocol.roster import Release

    typer.echo(tell(state_directory(state_dir), Release(fingerprint)).message)


def _time(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
