"""The ``mayfly`` command and its subcommands.

Each subcommand has a module. Every start imports all of these modules, so they import at the top
only what is fast to import; a subcommand imports the rest when it runs.

Exit codes: 0 done, or stopped by Ctrl-C or SIGTERM; 1 failed (a sentence on stderr tells why); 2
wrong usage. mayfly_cli is the only package that may import mayfly_reaper, and no other package may
import mayfly_cli.
"""

from __future__ import annotations

from typing import Annotated

import typer

from mayfly_cli.commands import (
    chat,
    config,
    control,
    doctor,
    drill,
    faults,
    front,
    keys,
    launch,
    node,
    serve,
    service,
    status,
    top,
    version,
)
from mayfly_cli.config.keys import COMMANDS
from mayfly_cli.config.options import with_options

app = typer.Typer(
    name="mayfly",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_versions(wanted: bool) -> None:
    if wanted:
        version.version()
        raise typer.Exit


@app.callback()
def mayfly(
    versions: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the versions, as `mayfly version` does.",
            callback=_print_versions,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Serve MLX language models from disposable workers."""


app.command()(with_options(serve.serve, COMMANDS["serve"]))
app.command()(with_options(node.node, COMMANDS["node"]))
app.command()(with_options(front.front, COMMANDS["front"]))
app.command()(status.status)
app.command()(top.top)
app.command()(chat.chat)
app.command()(launch.launch)
app.command()(doctor.doctor)
app.command()(control.recycle)
app.command()(control.drain)
app.command()(drill.drill)
app.add_typer(config.app)
app.add_typer(faults.app)
app.add_typer(keys.app)
app.add_typer(control.app)
app.add_typer(service.app)
app.command()(version.version)


def main() -> None:
    """Runs the subcommand that the process's arguments name."""
    app()
