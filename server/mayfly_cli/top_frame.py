"""A frame of ``mayfly top``: a snapshot of a server's workers, drawn for a terminal.

Every state of a worker is shown by a symbol and a word. Colours repeat the state, so that the frame
is also readable without colours.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import RenderableType

Snapshot = dict[str, Any]
"""The state of a server at one time: the JSON object in an event of the server's path
``/mayfly/events``."""
View = dict[str, Any]
"""The state of one worker in a snapshot, as a JSON object."""

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
"""Length of a progress bar, in characters."""
WIDE = 110
"""Width that all columns of a frame need, in characters. Narrower frames leave the age, the number
of answers and the memory out."""
LOSSES = 8
"""Largest number of lost workers that a frame lists."""
UNITS = ("B", "kB", "MB", "GB", "TB")


def has_speeds(snapshot: Snapshot) -> bool:
    """True if the speed (tokens per second) of every ready worker is known in a snapshot."""
    views = [view for view in _views(snapshot) if view["state"] == "ready"]
    return all(view.get("tokens_per_s") is not None for view in views)


def frame(snapshot: Snapshot, width: int = 0, height: int = 0) -> RenderableType:
    """Draws a snapshot for a terminal of ``width`` columns and ``height`` lines; 0 means no limit.
    If the height is small, fewer lost workers are listed."""
    slots, remarks = workers(snapshot, wide=not 0 < width < WIDE), list(_remarks(snapshot))
    left = height - slots.row_count - len(remarks) - 6 if height else LOSSES
    losses = last_losses(snapshot)[: max(0, min(LOSSES, left))]
    last = _losses(losses) if losses else Text("no worker was lost", style="dim")
    heading = Text("\nLast losses", style="bold")
    return Group(totals(snapshot), Text(), slots, *remarks, heading, last)


def totals(snapshot: Snapshot) -> Text:
    """Draws the first line of a frame: numbers of ready workers and of requests, and the total
    speed."""
    views = list(_views(snapshot))
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
    if snapshot.get("leaving"):
        line.append("  the server is shutting down", style="bold red")
    return line


def workers(snapshot: Snapshot, *, wide: bool = True) -> Table:
    """Draws a table with one row for each worker. There are two rows for a worker that is
    being replaced: the old and the new process."""
    several = len(snapshot["nodes"]) > 1
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
    for node in snapshot["nodes"]:
        for view in node["slots"]:
            result.add_row(Text(_name(node, view, several)), *_worker(view, wide))
    return result


def _remarks(snapshot: Snapshot) -> Iterator[Text]:
    """Yields lines below the table: nodes that are silent or have no workers, and details of
    workers."""
    several = len(snapshot["nodes"]) > 1
    for node in snapshot["nodes"]:
        if node["silent"]:
            yield Text(f"{node['node']} has not been heard of lately", style="red")
        elif not node["slots"]:
            yield Text(f"{node['node']} has no slots", style="dim")
        for view in node["slots"]:
            if view["detail"]:
                yield Text(f"{_name(node, view, several)}: {view['detail']}", style="dim")


def _name(node: Snapshot, view: View, several: bool) -> str:
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
    """Describes what a worker does: how much of its model is loaded, how many rows its batch has,
    or when its start is tried again."""
    if not view["pid"]:
        retry_in_s = view["retry_in_s"]
        return "" if retry_in_s is None else f"again in {span(retry_in_s)}"
    if view["state"] in ("ready", "draining"):
        waiting = f", {view['waiting']} waiting" if view["waiting"] else ""
        words = f"{view['running']} of {view['rows']} rows, {view['phase']}{waiting}"
        return f"{bar(view['running'], view['rows'])} {words}" if wide else words
    if not view["load_total"]:
        return str(view["phase"])
    words = f"{view['phase']} {size(view['load_done'])} of {size(view['load_total'])}"
    return f"{bar(view['load_done'], view['load_total'])} {words}" if wide else words


def last_losses(snapshot: Snapshot) -> list[dict[str, Any]]:
    """Returns the lost workers of all nodes, the latest first: their autopsies (records of the
    cause), or the first report of the loss if the autopsy is not written yet."""
    found = []
    for node in snapshot["nodes"]:
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
            Text(loss["first_cause"] or "no cause is known"),
        )
    return result


def bar(done: float, total: float) -> str:
    """Draws a bar of :data:`BAR` characters, filled by the share ``done`` of ``total``. At least
    one is filled if ``done`` is not 0."""
    filled = round(BAR * min(1.0, done / total)) if total else 0
    if done and total and not filled:
        filled = 1
    return "█" * filled + "░" * (BAR - filled)


def rate(per_second: float | None) -> str:
    """Formats a speed in tokens per second; a dash if it is not known."""
    if per_second is None:
        return "-"
    return f"{per_second:.0f}" if per_second >= 100 or not per_second else f"{per_second:.1f}"


def span(seconds: float) -> str:
    """Formats a duration in whole seconds, minutes, hours or days: "5 min"."""
    for most, unit, word in ((60, 1, "s"), (3600, 60, "min"), (172_800, 3600, "h")):
        if seconds < most:
            return f"{int(max(0.0, seconds) // unit)} {word}"
    return f"{int(seconds // 86_400)} days"


def size(count: float) -> str:
    """Formats a number of bytes with a unit, in powers of 1000: "1.2 GB"."""
    value, unit = float(count), 0
    while value >= 999.5 and unit < len(UNITS) - 1:
        value /= 1000
        unit += 1
    return f"{value:.{0 if value >= 9.95 or not unit else 1}f} {UNITS[unit]}"


def _views(snapshot: Snapshot) -> Iterator[View]:
    for node in snapshot["nodes"]:
        for view in node["slots"]:
            yield {**view, "node": node["node"]}
