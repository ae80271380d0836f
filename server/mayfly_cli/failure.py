"""The end of a ``mayfly`` command that fails."""

from __future__ import annotations

from typing import NoReturn

import typer


def fail(message: str) -> NoReturn:
    """Prints ``message`` on stderr, and ends the command with exit code 1."""
    typer.secho(f"mayfly: {message}", fg=typer.colors.RED, err=True)
    raise typer.Exit(1)
