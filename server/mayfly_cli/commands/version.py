"""``mayfly version``: prints the versions of Mayfly and its dependencies."""

from __future__ import annotations

import platform

import typer

PARTS = ("mlx", "mlx-lm", "pyzmq", "fastapi", "uvicorn")
"""Names of the Python packages whose versions `mayfly version` prints, for bug reports."""


def version() -> None:
    """Print the versions of Mayfly, Python and the main dependencies."""
    from importlib import metadata

    typer.echo(f"mayfly {metadata.version('mlx-mayfly')}")
    typer.echo(f"python {platform.python_version()} on {platform.system()} {platform.machine()}")
    for part in PARTS:
        try:
            typer.echo(f"{part} {metadata.version(part)}")
        except metadata.PackageNotFoundError:
            typer.echo(f"{part} not installed")
