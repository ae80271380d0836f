"""The command line in the test's own process."""

from __future__ import annotations

from click.testing import Result
from typer.testing import CliRunner

from mayfly_cli.app import app


def mayfly(*arguments: object) -> Result:
    """Runs ``mayfly`` with these arguments; its output is captured."""
    return CliRunner().invoke(app, list(map(str, arguments)))
