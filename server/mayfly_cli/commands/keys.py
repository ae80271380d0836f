"""``mayfly keys``: makes API keys for clients (``new``), which are stored as hashes in a file, and
manages the keys by which nodes and front ends authenticate each other (``init``, ``show``,
``trust``, ``revoke``)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from mayfly_cli.commands.control import StateDir, state_directory
from mayfly_cli.failure import fail

app = typer.Typer(name="keys", no_args_is_help=True)


@app.callback()
def keys() -> None:
    """Manage API keys of clients, and keys of nodes and front ends.

    Clients send an API key with each request: `new` makes one. Nodes and front ends on several
    machines authenticate each other by keys of their own: `init` makes this machine's key, `show`
    prints its public half, `trust` and `revoke` control who may connect to this machine's node.
    """


@app.command()
def new(
    file: Annotated[
        Path,
        typer.Argument(help="The keys file; it is created if it does not exist.", dir_okay=False),
    ],
    name: Annotated[
        str, typer.Argument(help="The name of the key's owner; shown in the server's log.")
    ],
    admin: Annotated[
        bool, typer.Option("--admin", help="The key may operate and observe the server.")
    ] = False,
    requests_per_minute: Annotated[
        int | None, typer.Option(help="Requests per minute that the key allows.", min=1)
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="Requests at a time that the key allows.", min=1)
    ] = None,
) -> None:
    """Make an API key, print it once, and add its hash to a file.

    A server that runs with --api-keys-file FILE accepts the key at once.
    """
    from mayfly_server.http.api_keys import KeysError, file_entry, new_key, parse_keys_file

    key = new_key()
    added = file_entry(
        name,
        key,
        admin=admin,
        requests_per_minute=requests_per_minute,
        concurrency=concurrency,
    )
    try:
        text = file.read_text() if file.exists() else ""
        parse_keys_file(text + added)
        # Only this user may read a new file; an existing one keeps its mode.
        descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "a") as target:
            target.write(added)
    except KeysError as error:
        fail(f"{file} stays as it is; with the new key in it: {error}")
    except OSError as error:
        fail(f"{file}: {error.strerror or error}")
    except UnicodeDecodeError:
        fail(f"{file} is not UTF-8 text")
    typer.echo(key)


@app.command()
def init(state_dir: StateDir = None) -> None:
    """Make this machine's key for connections between nodes and front ends, and print its public
    half.

    The secret half stays in the state directory, where only this user can read it.
    """
    from mayfly_protocol.transport.keys import IdentityError, make_pair

    try:
        typer.echo(make_pair(state_directory(state_dir)).public)
    except IdentityError as error:
        fail(str(error))


@app.command()
def show(
    state_dir: StateDir = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
) -> None:
    """Print this machine's public key, and the keys that it trusts."""
    from mayfly_protocol.transport import keys

    state = state_directory(state_dir)
    try:
        pair = keys.read_pair(state)
        trusted = keys.read_trusted(keys.trusted_file(state))
    except keys.IdentityError as error:
        fail(str(error))
    own = pair.public if pair is not None else None
    if json:
        from json import dumps

        named = [{"name": name, "key": key} for key, name in trusted.items()]
        typer.echo(dumps({"key": own, "trusted": named}, indent=2))
        return
    typer.echo(own or "this machine has no key: `mayfly keys init` makes one")
    for key, name in trusted.items():
        typer.echo(f"trusts {name}  {key}")


@app.command()
def trust(
    name: Annotated[str, typer.Argument(help="A name for the key's owner.")],
    key: Annotated[
        str,
        typer.Argument(help="The key that `mayfly keys show` prints on the front end's machine."),
    ],
    state_dir: StateDir = None,
) -> None:
    """Let the front end with a public key connect to this machine's node.

    A running node accepts the key at once.
    """
    from mayfly_protocol.transport.keys import add_trusted

    _change(state_dir, lambda trusted: add_trusted(trusted, name, key.strip()))
    typer.echo(f"{name} may connect")


@app.command()
def revoke(
    name: Annotated[str, typer.Argument(help="A name that `mayfly keys show` prints, or a key.")],
    state_dir: StateDir = None,
) -> None:
    """Stop trusting a key.

    A running node closes the key's connections, the open ones too, within about a second.
    """

    def without(trusted: dict[str, str]) -> dict[str, str]:
        left = {key: known for key, known in trusted.items() if name not in (key, known)}
        if left == trusted:
            names = ", ".join(trusted.values())
            others = f"; trusted are: {names}" if names else ", nor is any other name"
            fail(f"{name} is not trusted here{others}")
        return left

    _change(state_dir, without)
    typer.echo(f"{name} may not connect any more")


def _change(state_dir: Path | None, change: Callable[[dict[str, str]], dict[str, str]]) -> None:
    from mayfly_protocol.transport.keys import (
        IdentityError,
        read_trusted,
        trusted_file,
        write_trusted,
    )

    file = trusted_file(state_directory(state_dir))
    try:
        write_trusted(file, change(read_trusted(file)))
    except IdentityError as error:
        fail(str(error))
