"""``mayfly status``: the slots of every node that a server knows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from mayfly_server.cli.client import DEFAULT_URL, Url, connect, get_json
from mayfly_server.cli.failure import fail

if TYPE_CHECKING:
    from rich.table import Table

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

        Console().print(table(answer["nodes"]))


def table(nodes: list[dict[str, Any]]) -> Table:
    """One row a slot; a node without slots has a row of its own."""
    from rich.table import Table
    from rich.text import Text

    result = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("NODE", "SLOT", "MODEL", "STATE"):
        result.add_column(name)
    for name in ("INCARNATION", "PID", "RUNNING", "INFERENCES"):
        result.add_column(name, justify="right")
    for node in nodes:
        for slot in node["slots"]:
            state = str(slot["state"])
            result.add_row(
                Text(str(node["node"])),
                Text(str(slot["slot"])),
                Text(str(slot["model"])),
                Text(state, style=COLOURS.get(state, "")),
                str(slot["incarnation"]),
                str(slot["pid"] or "-"),
                str(slot["running"]),
                str(slot["inferences"]),
            )
        if not node["slots"]:
            result.add_row(Text(str(node["node"])), "-", "-", "no slots")
    return result
