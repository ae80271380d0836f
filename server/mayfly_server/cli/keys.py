"""``mayfly keys``: API keys for a server, kept as hashes in a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from mayfly_server.cli.failure import fail

app = typer.Typer(name="keys", help="Make API keys.", no_args_is_help=True)


@app.callback()
def keys() -> None:
    """Make API keys."""


@app.command()
def new(
    file: Annotated[
        Path, typer.Argument(help="The keys file; made if it isn't there.", dir_okay=False)
    ],
    name: Annotated[str, typer.Argument(help="Whose key it is; shown in the server's log.")],
    admin: Annotated[
        bool, typer.Option("--admin", help="The key may operate and observe the server.")
    ] = False,
    requests_per_minute: Annotated[
        int | None, typer.Option(help="Requests that it may send in a minute.", min=1)
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="Requests that it may have at a time.", min=1)
    ] = None,
) -> None:
    """Make a key, print it this once, and add its hash to a file.

    A server that runs with --api-keys-file FILE takes the key at once.
    """
    from mayfly_server.edge.keys import KeysError, entry, new_key, parse

    key = new_key()
    added = entry(
        name,
        key,
        admin=admin,
        requests_per_minute=requests_per_minute,
        concurrency=concurrency,
    )
    try:
        there = file.read_text() if file.exists() else ""
        parse(there + added)
        # Only this user may read it; a file that is there keeps its own mode.
        descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "a") as target:
            target.write(added)
    except KeysError as error:
        fail(f"{file}: {error}")
    except OSError as error:
        fail(f"{file}: {error.strerror or error}")
    except UnicodeDecodeError:
        fail(f"{file} is not UTF-8 text")
    typer.echo(key)
