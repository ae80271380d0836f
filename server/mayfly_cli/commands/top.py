"""``mayfly top``: the live page in a terminal."""

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

AGAIN_S = 1.0
"""Between two attempts to find a server again that was lost."""


def top(
    url: Url = DEFAULT_URL,
    once: Annotated[
        bool, typer.Option("--once", help="Print one frame, as soon as speeds are known.")
    ] = False,
) -> None:
    """Watch workers live and die. Ctrl-C ends."""
    import contextlib

    if not (once or sys.stdout.isatty()):
        fail("this is no terminal to watch in; --once prints one frame")
    with connect(url) as client, contextlib.suppress(KeyboardInterrupt):
        if once:
            _print(client)
        else:
            _watch(client)


def _pictures(client: httpx.Client) -> Iterator[dict[str, Any]]:
    """What the server says of itself until it leaves. Raises httpx.RequestError if it is lost."""
    import json

    for event in get_events(client, "/mayfly/events"):
        try:
            picture = json.loads(event)
            picture["nodes"]
        except (ValueError, LookupError, TypeError):
            fail(f"{client.base_url} answers, but not with a Mayfly server's events")
        yield picture


def _print(client: httpx.Client) -> None:
    import httpx
    from rich.console import Console

    from mayfly_cli.top_frame import frame, paced

    # What is no terminal has no width to fit into, and nothing is to be cut short there.
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    try:
        shown = next(each for each in _pictures(client) if paced(each) or each.get("leaving"))
    except httpx.RequestError as error:
        fail(unreachable(client, error))
    except StopIteration:
        fail(f"{client.base_url} ended the stream before it had told anything")
    console.print(frame(shown))


def _watch(client: httpx.Client) -> None:
    """Goes on when the server is lost and comes back; a server that was never there is an error."""
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
                for picture in _pictures(client):
                    shown = frame(picture, console.width, console.height)
                    live.update(shown, refresh=True)
            except httpx.RequestError as error:
                if shown is None:
                    live.stop()
                    fail(unreachable(client, error))
            lost = Text("not connected; trying again", style="bold red")
            live.update(Group(lost, shown or ""), refresh=True)
            time.sleep(AGAIN_S)
