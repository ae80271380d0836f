"""The records of lost workers, as ``mayfly faults`` shows them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mayfly_server.cli.failure import fail

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

Record = dict[str, Any]


def kept(state_dir: Path) -> list[Record]:
    """All records of a state directory, the oldest first. Ends the command where they can't be
    read."""
    from mayfly_reaper.autopsy import records

    try:
        return list(records(state_dir / "autopsies.jsonl"))
    except OSError as error:
        fail(f"cannot read the records: {error}")


def find(records: Iterable[Record], name: str) -> Record:
    """The one whose id, or the number at its end, is ``name``. Ends the command where there is
    none."""
    found = (each for each in records if name in (each.get("id"), str(each.get("incarnation"))))
    record = next(found, None)
    if record is None:
        fail(f"no record has the id {name!r}; `mayfly faults` lists them")
    return record


def summary(record: Record) -> Record:
    """What a list says of a record; the first cause is one line."""
    cause = str(record.get("first_cause", {}).get("text", ""))
    listed = {name: record.get(name) for name in ("id", "time", "slot", "kind", "scope")}
    return {**listed, "first_cause": cause.partition("\n")[0]}


def console() -> Console:
    """What is no terminal has no width to fit into, and nothing is to be cut short there."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 1000, highlight=False)


def table(records: Iterable[Record]) -> Table:
    """One row a loss, in the order given; times are local."""
    from datetime import datetime

    from rich.table import Table
    from rich.text import Text

    result = Table(box=None, pad_edge=False, header_style="bold")
    for header in ("ID", "TIME", "SLOT", "KIND", "SCOPE"):
        result.add_column(header, no_wrap=True)
    result.add_column("FIRST CAUSE", overflow="fold")
    for record in records:
        listed = summary(record)
        time = datetime.fromisoformat(str(listed.pop("time"))).astimezone()
        listed["time"] = time.strftime("%Y-%m-%d %H:%M:%S")
        columns = ("id", "time", "slot", "kind", "scope", "first_cause")
        result.add_row(*(Text(str(listed[column])) for column in columns))
    return result


def whole(record: Record) -> RenderableType:
    """Everything that a record says, with what its kind means."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from mayfly_protocol.faults import KINDS

    first = record["first_cause"]
    kind = KINDS.get(record["kind"])
    body = Table.grid(padding=(0, 2, 0, 0))
    body.add_column(style="bold", no_wrap=True)
    body.add_column(overflow="fold")
    if kind is not None:
        body.add_row("What happened", Text(kind.meaning))
        body.add_row("What you can do", Text(kind.advice))
    for name, value in record.items():
        if name not in ("first_cause", "later", "stderr", "survived"):
            body.add_row(name, Text(str(value)))
    parts: list[RenderableType] = [
        Text(f"{record['kind']} (scope: {record['scope']}): {first['text']}\n", style="bold"),
        body,
    ]
    for title, lines in (
        ("first cause", [first["traceback"]] if first["traceback"] else []),
        ("later", [f"{each['type']}: {each['text']}" for each in record["later"]]),
        (
            "survived before",
            [f"{each['kind']}, {each['ago_s']:.1f} s before" for each in record["survived"]],
        ),
        ("stderr", record["stderr"]),
    ):
        if lines:
            parts += [Text(f"\n{title}", style="bold"), Text("\n".join(lines))]
    return Group(*parts)
