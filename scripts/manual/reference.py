"""The pages of the manual that are made from the code: nothing in them is written twice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import MISSING
from typing import Any

import typer.main

from mayfly_cli.app import app
from mayfly_cli.commands.config import template, toml
from mayfly_cli.config.keys import SERVER, SHARED, Key
from mayfly_cli.config.keys import TABLE as MODEL_TABLE
from mayfly_protocol.faults import KINDS, TABLE, Kind
from mayfly_protocol.faults.cuda import CUDA
from mayfly_protocol.faults.engine import ENGINE, STREAM_THREAD
from mayfly_protocol.faults.examples import EXAMPLES
from mayfly_protocol.faults.exits import ENDS, LEAVINGS
from mayfly_protocol.faults.metal import METAL

Command = Any
"""Typer's; whether that is also click's depends on its version."""

_SCOPES = {
    "request": "that request fails, and nothing else",
    "batch": "the batch is thrown away and rebuilt in the same process; its requests are retried",
    "recycle": "the worker hands its requests over and leaves in good order",
    "worker": "the process is poisoned: it leaves at once, its requests go on elsewhere",
    "machine": "the same, and the next worker is not started right away",
    "model": "it would happen to the next worker too: the slot fails until it is reconfigured",
}
_FAMILIES: tuple[tuple[str, tuple[Kind, ...]], ...] = (
    ("Metal, and memory", METAL),
    ("Streams and threads", (STREAM_THREAD,)),
    ("CUDA", CUDA),
    ("The engine and the model", ENGINE),
    ("How a process ends, or stops without ending", ENDS),
    ("Leaving in good order, and not starting", LEAVINGS),
)


# Configuration


def configuration() -> str:
    models = [key for name, key in MODEL_TABLE.items() if name not in SHARED]
    server = [key for name, key in SERVER.items() if name not in SHARED]
    return "\n".join(
        [
            "# Configuration",
            "",
            "Everything that can be set is an option of `mayfly serve`, a variable and a line of a "
            "file alike. An option is stronger than a variable, a variable than the file, and the "
            "file than the default. Times are seconds; paths in a file are relative to it.",
            "",
            "```sh",
            "mayfly config init     # writes mayfly.toml, with every key in a comment",
            "mayfly config show     # prints what is in force, and where each value came from",
            "```",
            "",
            "The file is `mayfly.toml` in the folder where `mayfly serve` is started, or else the "
            "one in the platform's configuration directory; `--config` or `MAYFLY_CONFIG` names "
            "another. A key `max_rows` is the option `--max-rows` and the variable "
            "`MAYFLY_MAX_ROWS`. A switch that is on is turned off by `--no-...`.",
            "",
            "## The server",
            "",
            *_keys(server),
            "",
            "## Workers and models",
            "",
            "Outside of `[[models]]` these hold for every model that says nothing else.",
            "",
            *_keys(SHARED.values()),
            "",
            "## Several models",
            "",
            "Each `[[models]]` table has workers of its own, and takes what it leaves out from "
            "outside. Beside the keys above it has:",
            "",
            *_keys(models),
            "",
            "## A whole file",
            "",
            "```toml",
            template().rstrip(),
            "```",
            "",
        ]
    )


def _keys(keys: Iterable[Key]) -> Iterator[str]:
    yield "| key | default | means |"
    yield "|---|---|---|"
    for key in keys:
        yield f"| `{key.name}` | {_default(key)} | {_cell(_meaning(key))} |"


def _default(key: Key) -> str:
    if key.default is MISSING:
        return "needed"
    return "" if key.default in (None, ()) else f"`{toml(key.default)}`"


def _meaning(key: Key) -> str:
    parts = [key.doc]
    if key.one_of is not None:
        parts.append(f"One of {', '.join(f'`{value}`' for value in key.one_of)}.")
    if key.least is not None and key.most is not None:
        parts.append(f"From {key.least:g} to {key.most:g}.")
    elif key.least:
        parts.append(f"At least {key.least:g}.")
    return " ".join(parts)


# Command line


def commands() -> str:
    root = typer.main.get_command(app)
    lines = [
        "# Commands",
        "",
        "Exit codes: 0 done, or stopped by Ctrl-C or SIGTERM; 1 failed, and one sentence on stderr "
        "says how; 2 wrong usage. `--help` says the same as this page.",
        "",
    ]
    for path, command in _walk(("mayfly",), root):
        lines += _command(path, command)
    return "\n".join(lines)


def _walk(path: tuple[str, ...], command: Command) -> Iterator[tuple[tuple[str, ...], Command]]:
    """Every command that does something, groups that do so without a subcommand included."""
    inner: dict[str, Command] = getattr(command, "commands", {})
    if len(path) > 1 and (not inner or getattr(command, "invoke_without_command", False)):
        yield path, command
    for name, each in inner.items():
        if not each.hidden:
            yield from _walk((*path, name), each)


def _command(path: tuple[str, ...], command: Command) -> Iterator[str]:
    context = command.context_class(command, info_name=" ".join(path))
    keys = path == ("mayfly", "serve")
    yield f"## {' '.join(path)}"
    yield ""
    yield f"`{' '.join([*path, *command.collect_usage_pieces(context)])}`"
    yield ""
    yield str(command.help or "").strip()
    yield ""
    records = [
        record
        for parameter in command.params
        if not keys or parameter.name in ("model", "config")
        if (record := parameter.get_help_record(context)) is not None
    ]
    if records:
        yield "| | |"
        yield "|---|---|"
        yield from (f"| `{_cell(names)}` | {_cell(words)} |" for names, words in records)
        yield ""
    if keys:
        yield "Every key of the [configuration](configuration.md) is an option too."
        yield ""


# Faults


def faults() -> str:
    lines = [
        "# Faults, one by one",
        "",
        "MLX has no exception types of its own, and often the process is gone before anybody can "
        "catch one: a fault is known by its text, by how the process ended, or by clocks. This is "
        "the table by which Mayfly judges them. `mayfly faults explain < LOG` finds the first one "
        "in a log, which is the one that matters: what comes after it mostly only follows.",
        "",
        "How much is lost with a fault is its **scope**:",
        "",
        *(f"- `{name}`: {words}." for name, words in _SCOPES.items()),
        "",
    ]
    for family, kinds in _FAMILIES:
        lines += [f"## {family}", ""]
        for kind in kinds:
            lines += _fault(kind)
    told = {kind.name for _, kinds in _FAMILIES for kind in kinds}
    assert told == set(KINDS) >= {kind.name for kind in TABLE}, "a family of faults is left out"
    return "\n".join(lines)


def _fault(kind: Kind) -> Iterator[str]:
    yield f"### {kind.name}"
    yield ""
    examples = EXAMPLES.get(kind.name, [])
    if examples:
        yield "```text"
        yield from examples
        yield "```"
        yield ""
    yield f"Scope: `{kind.scope}`." + _blame(kind)
    yield ""
    for title, words in (
        ("What happened", kind.meaning),
        ("What Mayfly does", kind.reaction),
        ("What you can do", kind.advice),
    ):
        yield f"**{title}.** {words}"
        yield ""


def _blame(kind: Kind) -> str:
    if kind.follows:
        return " It is never the first error of its process: look for the one before it."
    if kind.strike == "suspects":
        return " The requests of the forward pass that failed become suspects."
    return " No request is suspected."


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("[[models]]", "`[[models]]`")
