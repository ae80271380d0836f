"""``mayfly faults``: what workers were lost to, what MLX dies of, and what it means."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from mayfly_server.cli import autopsies
from mayfly_server.cli.control import StateDir, state_directory
from mayfly_server.cli.failure import fail

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mayfly_protocol.faults import Explanation

app = typer.Typer(name="faults", help="List and explain what workers die of.")


@app.callback(invoke_without_command=True)
def faults(
    context: typer.Context,
    state_dir: StateDir = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the workers that were lost, the last one at the end."""
    context.obj = state_dir
    if context.invoked_subcommand is not None:
        return
    records = autopsies.kept(state_directory(state_dir))
    if json:
        from json import dumps

        listed = [autopsies.summary(record) for record in records]
        typer.echo(dumps(listed, indent=2, ensure_ascii=False))
    elif records:
        autopsies.console().print(autopsies.table(records))
    else:
        typer.echo("No worker was lost.")


@app.command()
def show(
    context: typer.Context,
    name: Annotated[
        str, typer.Argument(metavar="ID", help="A record's id, or the number at its end.")
    ],
    state_dir: StateDir = None,
    json: Annotated[bool, typer.Option("--json", help="Print the record as it is.")] = False,
) -> None:
    """Print all that is known of one lost worker."""
    directory = state_directory(state_dir or context.obj)
    record = autopsies.find(autopsies.kept(directory), name)
    if json:
        from json import dumps

        typer.echo(dumps(record, indent=2, ensure_ascii=False))
    else:
        autopsies.console().print(autopsies.whole(record))


@app.command()
def explain(
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Read a log or a traceback on stdin, and say what its first fault means.

    Ends with 1 where it recognises nothing.
    """
    import sys

    from mayfly_protocol.faults import explain as find

    if sys.stdin is None:  # as Python has it where the caller closed it
        fail("there is no stdin to read a log from")
    log = typer.get_text_stream("stdin", encoding="utf-8", errors="replace")
    if log.isatty():
        typer.echo("Paste the log, then press Ctrl-D.", err=True)
    explanation = find(log)
    if explanation is None:
        fail(
            "no line of this is a fault that Mayfly knows; out of the engine such an error counts "
            "as `unknown`, and the worker that raised it is replaced"
        )
    if json:
        from json import dumps

        typer.echo(dumps(as_json(explanation), indent=2, ensure_ascii=False))
    else:
        from rich.console import Console

        Console(highlight=False).print(as_text(explanation))


def as_json(explanation: Explanation) -> dict[str, Any]:
    """``line`` is counted from 1; ``later`` says by kind how often others came, and where first."""
    first = explanation.first
    return {
        "kind": first.kind.name,
        "scope": first.kind.scope,
        "strike": first.kind.strike,
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


def as_text(explanation: Explanation) -> RenderableType:
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
