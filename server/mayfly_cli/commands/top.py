"""``mayfly top``: shows the workers of a running server in a terminal, and updates them every
second."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mayfly_cli.commands.client import DEFAULT_URL, Url, connect, get_events, unreachable
from mayfly_cli.failure import fail

if TYPE_CHECKING:
    import httpx
    from rich.console import RenderableType

RETRY_S = 1.0
"""Seconds between two tries to connect again to a server that does not answer any more."""


def top(
    url: Url = DEFAULT_URL,
    once: Annotated[
        bool, typer.Option("--once", help="Print one frame, as soon as speeds are known.")
    ] = False,
) -> None:
    """Watch the workers' states, speeds and losses. Ctrl-C ends."""
    import contextlib

    if not (once or sys.stdout.isatty()):
        fail("the output is no terminal; --once prints one frame")
    with connect(url) as client, contextlib.suppress(KeyboardInterrupt):
        if once:
            _print(client)
        else:
            _watch(client)


def _snapshots(client: httpx.Client) -> Iterator[dict[str, Any]]:
    """Yields snapshots of the server's state, one per second, until the server ends the stream.
    Raises httpx.RequestError if the connection is lost."""
    import json

    for event in get_events(client, "/mayfly/events"):
        try:
            snapshot = json.loads(event)
            snapshot["nodes"]
        except (ValueError, LookupError, TypeError):
            fail(f"{client.base_url} answers, but not with the events of a Mayfly server")
        yield snapshot


def _print(client: httpx.Client) -> None:
    import httpx
    from rich.console import Console

    from mayfly_cli.top_frame import frame, has_speeds

    # A file or pipe has no width, and nothing is to be cut off there.
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    try:
        shown = next(each for each in _snapshots(client) if has_speeds(each) or each.get("leaving"))
    except httpx.RequestError as error:
        fail(unreachable(client, error))
    except StopIteration:
        fail(f"{client.base_url} ended the stream before it sent anything")
    console.print(frame(shown))


def _watch(client: httpx.Client) -> None:
    """Draws a frame for each snapshot of the server's state, and connects again if the connection
    is lost. Ends the command with an error if the server has never answered."""
    import time

    import httpx
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    from mayfly_cli.top_frame import frame

    console = Console(highlight=False)
    shown: RenderableType | None = None
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                for snapshot in _snapshots(client):
                    shown = frame(snapshot, console.width, console.height)
                    live.update(shown, refresh=True)
            except httpx.RequestError as error:
                if shown is None:
                    live.stop()
                    fail(unreachable(client, error))
            lost = Text("not connected; trying again", style="bold red")
            live.update(Group(lost, shown or ""), refresh=True)
            time.sleep(RETRY_S)
