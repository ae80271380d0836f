"""``mayfly drain``: an end that cuts nobody short."""

from __future__ import annotations

from typing import Annotated

import typer

from mayfly_server.cli.control import StateDir, serves, state_directory, tell

LOOK_S = 0.1


def drain(
    grace: Annotated[
        float, typer.Option(help="Seconds that running requests may still take.", min=0)
    ] = 60.0,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Return only when the server has ended.")
    ] = True,
    state_dir: StateDir = None,
) -> None:
    """Take no new requests, finish those that run, and end the server.

    A Ctrl-C here ends the waiting, not the draining.
    """
    import time

    from mayfly_protocol.roster import DrainNode

    state = state_directory(state_dir)
    typer.echo(tell(state, DrainNode(grace)).message)
    while wait and serves(state):
        time.sleep(LOOK_S)
