"""``mayfly config``: what a server is configured to be."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from mayfly_server.cli.configuration.options import configured, with_keys
from mayfly_server.cli.failure import fail

app = typer.Typer(name="config", no_args_is_help=True)


@app.callback()
def config() -> None:
    """Show or begin a configuration."""


def show(config: Path | None, given: Mapping[str, Any]) -> None:
    """Print the values in force as TOML, and where each came from.

    Takes the options of `mayfly serve`.
    """
    from mayfly_server.cli.configuration import writing

    configuration = configured(config, given)
    typer.echo(writing.show(configuration), nl=False)


app.command()(with_keys(show))


@app.command()
def init(
    file: Annotated[Path, typer.Argument(help="The file to write.", dir_okay=False)] = Path(
        "mayfly.toml"
    ),
) -> None:
    """Write a configuration file with every key in a comment."""
    from mayfly_server.cli.configuration import writing

    try:
        with file.open("x", encoding="utf-8") as target:
            target.write(writing.template())
    except FileExistsError:
        fail(f"{file} is there already")
    except OSError as error:
        fail(f"{file}: {error.strerror or error}")
    typer.echo(f"wrote {file}")
