"""``mayfly doctor``: checks if a model fits this machine's memory, before it is loaded.

The check needs MLX, which the ``mayfly`` process does not import, so ``mayfly_worker.doctor`` runs
as a child process. The child prints a JSON object: a :class:`mayfly_worker.doctor.Diagnosis`, or
``{"error": sentences}``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mayfly_cli.config.keys import TABLE
from mayfly_cli.config.options import typer_option
from mayfly_cli.failure import fail
from mayfly_protocol.capabilities import from_shown, in_words

if TYPE_CHECKING:
    from rich.console import RenderableType

DOCTOR = (sys.executable, "-P", "-m", "mayfly_worker.doctor")


def _check_kv_bits(bits: int | None) -> int | None:
    """Returns ``bits``. Ends the command with exit code 2 (wrong usage) if MLX cannot quantize the
    KV cache to this number of bits."""
    widths = TABLE["kv_bits"].one_of
    if bits is not None and bits not in widths:
        raise typer.BadParameter(f"{bits} is not one of {', '.join(map(str, widths))}")
    return bits


def doctor(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A model's folder or Hugging Face repository id, as for `mayfly serve`. "
            "Nothing is downloaded.",
        ),
    ] = None,
    workers: Annotated[
        int, typer.Option(help="Worker processes that share the memory.", min=1)
    ] = 1,
    max_rows: Annotated[int | None, typer_option(TABLE["max_rows"])] = None,
    kv_bits: Annotated[int | None, typer_option(TABLE["kv_bits"], callback=_check_kv_bits)] = None,
    adapter: Annotated[Path | None, typer_option(TABLE["adapter"])] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help=TABLE["trust_remote_code"].declared.help),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Check that a model fits this machine before it is loaded.

    Shows the memory that the model needs, and how many sequences may run at once. Exit code 1 if
    the model does not fit.
    """
    from json import dumps

    import platformdirs

    from mayfly_cli.commands import starting

    starting.require_mlx()
    starting.require_open_files()
    options = {
        "memory_share": 1 / workers,
        "max_rows": max_rows,
        "kv_bits": kv_bits,
        "adapter": str(adapter.resolve()) if adapter else None,
        "trust_remote_code": trust_remote_code or None,
    }
    given = {key: value for key, value in options.items() if value is not None}
    command = [*DOCTOR, "--cache", str(platformdirs.user_cache_path("mayfly"))]
    diagnosis = examine([*command, "--options", dumps(given), "--", model or ""])
    if json:
        typer.echo(dumps(diagnosis, indent=2))
    else:
        from rich.console import Console

        Console(highlight=False, width=None if sys.stdout.isatty() else 1000).print(
            as_text(diagnosis)
        )
    raise typer.Exit(0 if diagnosis["fits"] else 1)


def examine(command: Sequence[str]) -> dict[str, Any]:
    """Runs the child process that checks a model, and returns its diagnosis, a JSON object. Ends
    the command with an error if the check fails."""
    import subprocess
    from json import loads

    # A session of its own keeps a terminal's Ctrl-C from the child; this process ends it instead.
    ran = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, start_new_session=True
    )
    try:
        answer: dict[str, Any] = loads(ran.stdout)
    except ValueError:
        last = ran.stderr.strip().rpartition("\n")[2] or "it printed nothing"
        fail(f"the check of the model ended with status {ran.returncode}: {last}")
    if "error" in answer:
        fail(answer["error"])
    return answer


def as_text(diagnosis: dict[str, Any]) -> RenderableType:
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    head = Text(diagnosis["model"], style="bold")
    head.append(f" ({diagnosis['architecture']}) on {diagnosis['device']}", style="not bold")
    needs = Table.grid(padding=(0, 2, 0, 0))
    needs.add_row("weights", size(diagnosis["weight_bytes"]))
    needs.add_row("KV cache", _kv_cache(diagnosis))
    needs.add_row(
        "memory",
        f"{size(diagnosis['memory_bytes'])}, of which {size(diagnosis['kv_budget'])} "
        "for the KV caches of what runs",
    )
    for subject, text in in_words(from_shown(diagnosis["capabilities"])).items():
        needs.add_row(subject, text)
    rows = Table(box=None, pad_edge=False, header_style="bold")
    rows.add_column("CONTEXT", justify="right")
    rows.add_column("SEQUENCES AT ONCE")
    for fit in diagnosis["rows"]:
        bound = " (--max-rows)" if fit["rows"] == diagnosis["max_rows"] > 1 else ""
        rows.add_row(f"{fit['context']:,}", f"{fit['rows']:,}{bound}")
    parts: list[RenderableType] = [head, Padding(needs, (1, 0), expand=False), rows]
    if not diagnosis["fits"]:
        parts.append(Padding(Text("It does not fit.", style="red"), (1, 0, 0, 0), expand=False))
    return Group(*parts)


def _kv_cache(diagnosis: dict[str, Any]) -> str:
    """Describes the KV cache's memory per token, per sequence, or both: the cache of some layers
    grows with each token of a sequence, that of other layers has a fixed size."""
    costs = [
        f"{size(diagnosis[key])} a {what}"
        for key, what in (("kv_bytes_per_token", "token"), ("kv_bytes_per_row", "sequence"))
        if diagnosis[key]
    ]
    return " and ".join(costs) or "none"


def size(count: int) -> str:
    """Formats a number of bytes with a unit: "1.2 GB"."""
    for unit, bytes_of_it in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= bytes_of_it:
            return f"{count / bytes_of_it:.1f} {unit}"
    return f"{count} bytes"
