"""``mayfly faults``: lists lost workers, prints the record (autopsy) of each, and explains MLX's
errors."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mayfly_cli.commands.control import StateDir, state_directory
from mayfly_cli.failure import fail

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from mayfly_protocol.faults import Explanation

app = typer.Typer(name="faults", help="List lost workers, and explain the faults that end them.")

Record = dict[str, Any]
"""An autopsy: the record of a lost worker and the cause of its loss, as a JSON object."""


@app.callback(invoke_without_command=True)
def faults(
    context: typer.Context,
    state_dir: StateDir = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the lost workers, the latest last."""
    context.obj = state_dir
    if context.invoked_subcommand is not None:
        return
    records = _read_records(state_directory(state_dir))
    if json:
        from json import dumps

        listed = [_summary(record) for record in records]
        typer.echo(dumps(listed, indent=2, ensure_ascii=False))
    elif records:
        _console().print(_table(records))
    else:
        typer.echo("No worker was lost.")


@app.command()
def show(
    context: typer.Context,
    name: Annotated[
        str, typer.Argument(metavar="ID", help="The autopsy's id, or the number at its end.")
    ],
    state_dir: StateDir = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print the autopsy as JSON, as it was written.")
    ] = False,
) -> None:
    """Print the autopsy of a lost worker."""
    directory = state_directory(state_dir or context.obj)
    record = _find(_read_records(directory), name)
    if json:
        from json import dumps

        typer.echo(dumps(record, indent=2, ensure_ascii=False))
    else:
        _console().print(_autopsy(record))


@app.command()
def explain(
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Read a log or a traceback on stdin, and explain its first fault.

    Exit code 1 if no line is a known fault.
    """
    from mayfly_protocol.faults import explain as explain_log

    if sys.stdin is None:  # as Python has it where the caller closed it
        fail("there is no stdin to read a log from")
    log = typer.get_text_stream("stdin", encoding="utf-8", errors="replace")
    if log.isatty():
        typer.echo("Paste the log, then press Ctrl-D.", err=True)
    explanation = explain_log(log)
    if explanation is None:
        fail(
            "no line of this is a fault that Mayfly knows; if the engine raises such an error, the "
            "fault counts as `unknown`, and the worker is replaced"
        )
    if json:
        from json import dumps

        typer.echo(dumps(_as_json(explanation), indent=2, ensure_ascii=False))
    else:
        from rich.console import Console

        Console(highlight=False).print(_as_text(explanation))


def _read_records(state_dir: Path) -> list[Record]:
    """Reads the autopsies (records of lost workers) in a state directory, the oldest first. Ends
    the command with an error if the file cannot be read."""
    from mayfly_reaper.crash_log import read_records

    try:
        return list(read_records(state_dir / "autopsies.jsonl"))
    except OSError as error:
        fail(f"cannot read the autopsies: {error}")


def _find(records: Iterable[Record], name: str) -> Record:
    """Returns the autopsy (record of a lost worker) whose id is ``name``, or whose worker process
    has the number ``name``. Ends the command with an error if there is none."""
    found = (each for each in records if name in (each.get("id"), str(each.get("incarnation"))))
    record = next(found, None)
    if record is None:
        fail(f"no record has the id {name!r}; `mayfly faults` lists them")
    return record


def _summary(record: Record) -> Record:
    """Returns the fields of an autopsy (record of a lost worker) that a list shows. Of the first
    cause, only the first line is kept."""
    cause = str(record.get("first_cause", {}).get("text", ""))
    listed = {name: record.get(name) for name in ("id", "time", "slot", "kind", "scope")}
    return {**listed, "first_cause": cause.partition("\n")[0]}


def _console() -> Console:
    """Makes a console for output: as wide as the terminal, or 1000 columns wide for a file or a
    pipe, so that nothing is cut off."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 1000, highlight=False)


def _table(records: Iterable[Record]) -> Table:
    """Draws a table with one row for each lost worker, in the order of ``records``. Times are
    local."""
    from datetime import datetime

    from rich.table import Table
    from rich.text import Text

    result = Table(box=None, pad_edge=False, header_style="bold")
    for header in ("ID", "TIME", "SLOT", "KIND", "SCOPE"):
        result.add_column(header, no_wrap=True)
    result.add_column("FIRST CAUSE", overflow="fold")
    for record in records:
        listed = _summary(record)
        time = datetime.fromisoformat(str(listed.pop("time"))).astimezone()
        listed["time"] = time.strftime("%Y-%m-%d %H:%M:%S")
        columns = ("id", "time", "slot", "kind", "scope", "first_cause")
        result.add_row(*(Text(str(listed[column])) for column in columns))
    return result


def _autopsy(record: Record) -> RenderableType:
    """Draws the whole autopsy (record of a lost worker), with an explanation of its kind of
    fault."""
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


def _as_json(explanation: Explanation) -> dict[str, Any]:
    """Returns the explanation of a log's first fault as a JSON object. ``line`` is the fault's line
    in the log, from 1 on. ``later`` lists the other kinds of fault in the log, each with the line
    of its first fault and the number of its faults."""
    first = explanation.first
    return {
        "kind": first.kind.name,
        "scope": first.kind.scope,
        "strike": first.kind.blame,
        "line": first.line,
        "text": first.excerpt,
        "meaning": first.kind.meaning,
        "reaction": first.kind.reaction,
        "advice": first.kind.advice,
        "later": [
            {
                "kind": each.kind.name,
                "scope": each.kind.scope,
                "line": each.line,
                "count": each.count,
            }
            for each in explanation.later
        ],
    }


def _as_text(explanation: Explanation) -> RenderableType:
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    first = explanation.first
    head = Text(first.kind.name, style="bold")
    head.append(f" (scope: {first.kind.scope}), in line {first.line}:", style="not bold")
    body = Table.grid(padding=(0, 2, 1, 0))
    body.add_column(style="bold", no_wrap=True)
    body.add_column(max_width=80)
    body.add_row("What happened", Text(first.kind.meaning))
    body.add_row("What Mayfly does", Text(first.kind.reaction))
    body.add_row("What you can do", Text(first.kind.advice))
    if explanation.later:
        body.add_row("What came later", Text("\n".join(_later_lines(explanation))))
    return Group(head, Padding(Text(first.excerpt), (0, 0, 1, 2)), body)


def _later_lines(explanation: Explanation) -> list[str]:
    return [
        f"{each.kind.name} (scope: {each.kind.scope}) in line {each.line}"
        + (f", {each.count} times in all" if each.count > 1 else "")
        for each in explanation.later
    ]
