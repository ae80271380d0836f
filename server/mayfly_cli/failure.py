"""How a command gives up."""

from __future__ import annotations

from typing import NoReturn

import typer


def fail(message: str) -> NoReturn:
    """Says on stderr why the command can't go on, and ends it with exit code 1."""
    typer.secho(f"mayfly: {message}", fg=typer.colors.RED, err=True)
    raise typer.Exit(1)
