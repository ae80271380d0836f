"""Runs the ``mayfly`` command within the test's own process."""

from __future__ import annotations

from click.testing import Result
from typer.testing import CliRunner

from mayfly_cli.app import app


def mayfly(*arguments: object) -> Result:
    """Runs ``mayfly`` with these arguments; returns its exit code and captured output."""
    return CliRunner().invoke(app, list(map(str, arguments)))
