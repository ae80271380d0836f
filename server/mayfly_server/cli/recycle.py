"""``mayfly recycle``: fresh workers for those that serve."""

from __future__ import annotations

from typing import Annotated

import typer

from mayfly_server.cli.control import StateDir, state_directory, tell


def recycle(
    slot: Annotated[
        str | None, typer.Argument(help="The slot, as `mayfly status` names it.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All slots, one after the other.")] = False,
    state_dir: StateDir = None,
) -> None:
    """Replace workers in good order.

    What they run goes on. A slot that failed or waits is tried again at once.
    """
    from mayfly_protocol.roster import Recycle

    if (slot is not None) == every:
        raise typer.BadParameter("name one slot, or say --all", param_hint="SLOT")
    typer.echo(tell(state_directory(state_dir), Recycle(slot or "")).message)
