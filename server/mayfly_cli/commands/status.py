"""``mayfly status``: lists the workers of every node that a running server knows."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mayfly_cli.commands.client import DEFAULT_URL, Url, connect, get_json
from mayfly_cli.failure import fail

if TYPE_CHECKING:
    from rich.table import Table

COLOURS = {"ready": "green", "failed": "red", "backoff": "yellow", "draining": "cyan"}


def status(
    url: Url = DEFAULT_URL,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show the state of every worker."""
    with connect(url) as client:
        answer = get_json(client, "/mayfly/status")
    if not isinstance(answer, dict) or not isinstance(answer.get("nodes"), list):
        fail(f"{url} answers, but not as a Mayfly server: its answer has no nodes")
    if json:
        from json import dumps

        typer.echo(dumps(answer, indent=2))
    else:
        from rich.console import Console

        # A file or pipe has no width, and no name is to be cut off there.
        width = None if sys.stdout.isatty() else 1000
        Console(width=width).print(table(answer["nodes"]))


def table(nodes: list[dict[str, Any]]) -> Table:
    """Draws a table with one row for each slot (a node's place for one worker process), and one row
    for a node without slots. Nodes that have sent nothing lately are marked as silent, because
    their rows may be out of date."""
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
