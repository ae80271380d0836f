"""``mayfly status``: the slots of every node that a server knows.

One frame of ``mayfly top``: what a server says of itself, drawn for a terminal.

Every state has a sign and a word; colour only repeats them.

``mayfly top``: the live page in a terminal.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mayfly_cli.commands.client import DEFAULT_URL, Url, connect, get_json
from mayfly_cli.failure import fail

if TYPE_CHECKING:
    from rich.table import Table


from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import RenderableType


from typing import TYPE_CHECKING

from mayfly_cli.commands.client import get_events, unreachable

if TYPE_CHECKING:
    import httpx


COLOURS = {"ready": "green", "failed": "red", "backoff": "yellow", "draining": "cyan"}


def status(
    url: Url = DEFAULT_URL,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show every worker's state."""
    with connect(url) as client:
        answer = get_json(client, "/mayfly/status")
    if not isinstance(answer, dict) or not isinstance(answer.get("nodes"), list):
        fail(f"{url} answers, but not with a Mayfly server's status")
    if json:
        from json import dumps

        typer.echo(dumps(answer, indent=2))
    else:
        from rich.console import Console

        # What is no terminal has no width to fit into, and no name is to be cut short there.
        width = None if sys.stdout.isatty() else 1000
        Console(width=width).print(table(answer["nodes"]))


def table(nodes: list[dict[str, Any]]) -> Table:
    """One row a slot; a node without slots has a row of its own. A node that has not been heard of
    lately is marked: what is shown of it may be over."""
    from rich.table import Table
    from rich.text import Text

    result = Table(box=None, pad_edge=False, header_style="bold")
    for header in ("NODE", "SLOT", "MODEL", "STATE"):
        result.add_column(header, overflow="fold")
    for header in ("INCARNATION", "PID", "RUNNING", "INFERENCES"):
        result.add_column(header, justify="right", overflow="fold")
    for node in nodes:
        name = f"{node['node']} (silent)" if node.get("silent") else str(node["node"])
        for slot in node["slots"]:
            state = str(slot["state"])
            result.add_row(
                Text(name),
                Text(str(slot["slot"])),
                Text(str(slot["model"])),
                Text(state, style=COLOURS.get(state, "")),
                str(slot["incarnation"]),
                str(slot["pid"] or "-"),
                str(slot["running"]),
                str(slot["inferences"]),
            )
        if not node["slots"]:
            result.add_row(Text(name), "-", "-", "no slots")
    return result


Picture = dict[str, Any]
View = dict[str, Any]

SIGNS = {
    "spawning": ("◌", "starting", "cyan"),
    "loading": ("◔", "loading", "cyan"),
    "canary": ("◑", "trying out", "cyan"),
    "ready": ("●", "ready", "green"),
    "draining": ("◒", "draining", "yellow"),
    "backoff": ("‖", "waiting", "yellow"),
    "failed": ("✕", "failed", "red"),
    "gone": ("†", "lost", "red"),
}
BAR = 16
"""Characters."""
WIDE = 110
"""Characters that all columns need; below that, only those stay that one acts upon."""
LOSSES = 8
UNITS = ("B", "kB", "MB", "GB", "TB")


def paced(picture: Picture) -> bool:
    """Whether the speed of every worker that serves is known."""
    views = [view for view in _views(picture) if view["state"] == "ready"]
    return all(view.get("tokens_per_s") is not None for view in views)


def frame(picture: Picture, width: int = 0, height: int = 0) -> RenderableType:
    """The whole picture, for a terminal of so many columns and lines, or for any: in a low one,
    losses are left out as far as needed."""
    slots, remarks = workers(picture, wide=not 0 < width < WIDE), list(_remarks(picture))
    left = height - slots.row_count - len(remarks) - 6 if height else LOSSES
    losses = last_losses(picture)[: max(0, min(LOSSES, left))]
    last = _losses(losses) if losses else Text("no worker was lost", style="dim")
    heading = Text("\nLast losses", style="bold")
    return Group(totals(picture), Text(), slots, *remarks, heading, last)


def totals(picture: Picture) -> Text:
    """One line about all."""
    views = list(_views(picture))
    slots = {(view["node"], view["slot"]) for view in views}
    ready = {(view["node"], view["slot"]) for view in views if view["state"] == "ready"}
    running = sum(view["running"] for view in views)
    waiting = sum(view["waiting"] for view in views)
    speed = sum(view.get("tokens_per_s") or 0.0 for view in views)
    line = Text("Mayfly", style="bold")
    line.append(
        f"  {len(ready)} of {len(slots)} ready · {running} running · {waiting} waiting"
        f" · {rate(speed)} tokens/s",
        style="not bold",
    )
    if picture.get("leaving"):
        line.append("  the server is shutting down", style="bold red")
    return line


def workers(picture: Picture, *, wide: bool = True) -> Table:
    """One row a worker; a slot whose worker is being replaced has two."""
    several = len(picture["nodes"]) > 1
    result = Table(box=None, pad_edge=False, header_style="bold")
    result.add_column("SLOT", overflow="fold")
    result.add_column("STATE", no_wrap=True)
    result.add_column("WORKER" if wide else "#", justify="right", no_wrap=True)
    result.add_column("PID", justify="right", no_wrap=True)
    if wide:
        result.add_column("AGE", justify="right", no_wrap=True)
    result.add_column("DOING", overflow="fold")
    result.add_column("TOKENS/S" if wide else "TOK/S", justify="right", no_wrap=True)
    if wide:
        result.add_column("ANSWERED", justify="right", no_wrap=True)
        result.add_column("MEMORY", justify="right", no_wrap=True)
    for node in picture["nodes"]:
        for view in node["slots"]:
            result.add_row(Text(_name(node, view, several)), *_worker(view, wide))
    return result


def _remarks(picture: Picture) -> Iterator[Text]:
    """What does not fit into a column."""
    several = len(picture["nodes"]) > 1
    for node in picture["nodes"]:
        if node["silent"]:
            yield Text(f"{node['node']} has not been heard of lately", style="red")
        elif not node["slots"]:
            yield Text(f"{node['node']} has no slots", style="dim")
        for view in node["slots"]:
            if view["detail"]:
                yield Text(f"{_name(node, view, several)}: {view['detail']}", style="dim")


def _name(node: Picture, view: View, several: bool) -> str:
    return f"{node['node']}/{view['slot']}" if several else str(view["slot"])


def _worker(view: View, wide: bool) -> Iterator[Text]:
    sign, word, colour = SIGNS.get(view["state"], ("?", view["state"], ""))
    yield Text(f"{sign} {word}{', on trial' if view['trial'] else ''}", style=colour)
    yield Text(f"#{view['incarnation']}" if view["pid"] else "-")
    yield Text(str(view["pid"] or "-"))
    if wide:
        yield Text(span(view["age_s"]) if view["pid"] else "-")
    yield Text(_doing(view, wide))
    yield Text(rate(view.get("tokens_per_s")) if view["pid"] else "-")
    if wide:
        yield Text(str(view["inferences"]))
        yield Text(size(view["footprint"]) if view["footprint"] else "-")


def _doing(view: View, wide: bool) -> str:
    """How far a load is, or how full a batch."""
    if not view["pid"]:
        soon = view["retry_in_s"]
        return "" if soon is None else f"again in {span(soon)}"
    if view["state"] in ("ready", "draining"):
        waiting = f", {view['waiting']} waiting" if view["waiting"] else ""
        words = f"{view['running']} of {view['rows']} rows, {view['phase']}{waiting}"
        return f"{bar(view['running'], view['rows'])} {words}" if wide else words
    if not view["load_total"]:
        return str(view["phase"])
    words = f"{view['phase']} {size(view['load_done'])} of {size(view['load_total'])}"
    return f"{bar(view['load_done'], view['load_total'])} {words}" if wide else words


def last_losses(picture: Picture) -> list[dict[str, Any]]:
    """Autopsies of all nodes, and losses that have none yet, the latest first."""
    found = []
    for node in picture["nodes"]:
        recorded = {(each["slot"], each["incarnation"]) for each in node["autopsies"]}
        fresh = [
            each for each in node["losses"] if (each["slot"], each["incarnation"]) not in recorded
        ]
        found += [{**each, "node": node["node"]} for each in (*node["autopsies"], *fresh)]
    return sorted(found, key=lambda each: float(each["age_s"]))


def _losses(losses: Iterable[dict[str, Any]]) -> Table:
    result = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(3):
        result.add_column(no_wrap=True)
    result.add_column(overflow="fold")
    for loss in losses:
        result.add_row(
            Text(f"{span(loss['age_s'])} ago", style="dim"),
            Text(f"{loss['slot']} #{loss['incarnation']}"),
            Text(f"† {loss['kind']}", style="red"),
            Text(loss["first_cause"] or "no cause was told"),
        )
    return result


def bar(done: float, total: float) -> str:
    filled = round(BAR * min(1.0, done / total)) if total else 0
    if done and total and not filled:
        filled = 1
    return "█" * filled + "░" * (BAR - filled)


def rate(per_second: float | None) -> str:
    if per_second is None:
        return "-"
    return f"{per_second:.0f}" if per_second >= 100 or not per_second else f"{per_second:.1f}"


def span(seconds: float) -> str:
    """In the largest unit that fits."""
    for most, unit, word in ((60, 1, "s"), (3600, 60, "min"), (172_800, 3600, "h")):
        if seconds < most:
            return f"{int(max(0.0, seconds) // unit)} {word}"
    return f"{int(seconds // 86_400)} days"


def size(count: float) -> str:
    """Bytes, in powers of ten."""
    value, unit = float(count), 0
    while value >= 999.5 and unit < len(UNITS) - 1:
        value /= 1000
        unit += 1
    return f"{value:.{0 if value >= 9.95 or not unit else 1}f} {UNITS[unit]}"


def _views(picture: Picture) -> Iterator[View]:
    for node in picture["nodes"]:
        for view in node["slots"]:
            yield {**view, "node": node["node"]}


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

    pass

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

    pass

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
