"""``mayfly status``: lists the workers of every node that a running server knows."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mayfly_cli.commands.client import DEFAULT_URL, Url, connect, get_json
from mayfly_cli.failure import fail
from mayfly_protocol.capabilities import from_shown, in_words

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
        console = Console(width=width)
        console.print(table(answer["nodes"]))
        for line in models(answer["nodes"]):
            console.print(line, markup=False, highlight=False)


def models(nodes: list[dict[str, Any]]) -> list[str]:
    """Describes the capabilities of each model that a worker has loaded, a line for each
    capability. Workers of one model differ where their machines do: each description is given
    once."""
    described: dict[tuple[str, ...], None] = {}
    for slot in (slot for node in nodes for slot in node["slots"]):
        if slot.get("capabilities"):
            words = in_words(from_shown(slot["capabilities"]))
            lines = (f"  {subject}: {text}" for subject, text in words.items())
            described["", str(slot["model"]), *lines] = None
    return [line for lines in described for line in lines]


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
