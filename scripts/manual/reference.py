"""The pages of the manual that are generated from the code: configuration, commands, faults."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import MISSING
from typing import Any

import typer.main

from mayfly_cli.app import app
from mayfly_cli.commands.config import template, toml
from mayfly_cli.config.keys import SERVER, SHARED, ConfigKey
from mayfly_cli.config.keys import TABLE as MODEL_TABLE
from mayfly_protocol.faults import KINDS, TABLE, Kind
from mayfly_protocol.faults.cuda import CUDA
from mayfly_protocol.faults.engine import ENGINE, STREAM_THREAD
from mayfly_protocol.faults.examples import EXAMPLES
from mayfly_protocol.faults.exits import ENDS, LEAVINGS
from mayfly_protocol.faults.metal import METAL

Command = Any
"""A command object of typer, which is one of click in some versions only."""

_SCOPES = {
    "request": "that request fails, and nothing else",
    "batch": "the batch is discarded and rebuilt in the same process; its requests are retried",
    "recycle": "the worker hands its requests over to other workers and exits in good order",
    "worker": "the process is unusable: it exits at once, and its requests continue elsewhere",
    "machine": "as with `worker`, and the next worker is not started right away",
    "model": "the next worker would fail too: the slot fails until its configuration is changed",
}
_FAMILIES: tuple[tuple[str, tuple[Kind, ...]], ...] = (
    ("Metal, and memory", METAL),
    ("Streams and threads", (STREAM_THREAD,)),
    ("CUDA", CUDA),
    ("The engine and the model", ENGINE),
    ("Processes that end or hang", ENDS),
    ("Orderly exits, and failures to start", LEAVINGS),
)


# Configuration


def configuration() -> str:
    """Writes the page on the configuration's keys."""
    models = [key for name, key in MODEL_TABLE.items() if name not in SHARED]
    server = [key for name, key in SERVER.items() if name not in SHARED]
    return "\n".join(
        [
            "# Configuration",
            "",
            "Every setting is an option of `mayfly serve`, an environment variable and a key of a "
            "file. An option overrides a variable, a variable overrides the file, and the file "
            "overrides the default. Times are in seconds; paths in a file are relative to it.",
            "",
            "```sh",
            "mayfly config init     # writes mayfly.toml, with every key in a comment",
            "mayfly config show     # prints the settings in force, and where each value came from",
            "```",
            "",
            "The file is `mayfly.toml` in the folder where `mayfly serve` is started, or else the "
            "one in the platform's configuration directory; `--config` or `MAYFLY_CONFIG` names "
            "another one. The key `max_rows` is the option `--max-rows` and the variable "
            "`MAYFLY_MAX_ROWS`. `--no-...` turns off a switch that is on.",
            "",
            "## The server",
            "",
            *_keys(server),
            "",
            "## Workers and models",
            "",
            "Outside of `[[models]]` these keys hold for every model that does not set them.",
            "",
            *_keys(SHARED.values()),
            "",
            "## Several models",
            "",
            "Each `[[models]]` table has workers of its own. Keys that it does not set have the "
            "values from outside of it. In addition to the keys above it has:",
            "",
            *_keys(models),
            "",
            "## A complete file",
            "",
            "```toml",
            template().rstrip(),
            "```",
            "",
        ]
    )


def _keys(keys: Iterable[ConfigKey]) -> Iterator[str]:
    yield "| key | default | means |"
    yield "|---|---|---|"
    for key in keys:
        yield f"| `{key.name}` | {_default(key)} | {_cell(_meaning(key))} |"


def _default(key: ConfigKey) -> str:
    if key.default is MISSING:
        return "needed"
    return "" if key.default in (None, ()) else f"`{toml(key.default)}`"


def _meaning(key: ConfigKey) -> str:
    least, most = key.declared.at_least, key.declared.at_most
    parts = [key.declared.help]
    if key.one_of:
        parts.append(f"One of {', '.join(f'`{value}`' for value in key.one_of)}.")
    if least is not None and most is not None:
        parts.append(f"From {least:g} to {most:g}.")
    elif least:
        parts.append(f"At least {least:g}.")
    if key.declared.aliases:
        parts.append(f"Also the option {', '.join(f'`{flag}`' for flag in key.declared.aliases)}.")
    return " ".join(parts)


# Command line


def commands() -> str:
    """Writes the page on the commands."""
    root = typer.main.get_command(app)
    lines = [
        "# Commands",
        "",
        "Exit codes: 0 for success, or a stop by Ctrl-C or SIGTERM; 1 for a failure, with one "
        "sentence on stderr; 2 for wrong usage. `--help` prints the same as this page.",
        "",
    ]
    for path, command in _walk(("mayfly",), root):
        lines += _command(path, command)
    return "\n".join(lines)


def _walk(path: tuple[str, ...], command: Command) -> Iterator[tuple[tuple[str, ...], Command]]:
    """Yields every command that can be run, including groups that run without a subcommand."""
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
    """Writes the page on the faults."""
    lines = [
        "# Faults, one by one",
        "",
        "MLX has no exception types of its own, and often the process is gone before an exception "
        "could be caught. Mayfly identifies a fault by its error message, by how the process "
        "ended, or by a timeout, and this is its table of them. `mayfly faults explain < LOG` "
        "finds the first fault in a log. That is the one that matters: later errors are usually "
        "consequences.",
        "",
        "The **scope** of a fault says how much is lost with it:",
        "",
        *(f"- `{name}`: {words}." for name, words in _SCOPES.items()),
        "",
    ]
    for family, kinds in _FAMILIES:
        lines += [f"## {family}", ""]
        for kind in kinds:
            lines += _fault(kind)
    listed = {kind.name for _, kinds in _FAMILIES for kind in kinds}
    assert listed == set(KINDS) >= {kind.name for kind in TABLE}, "a family of faults is left out"
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
        return " It is never the first error of its process: look for an earlier one."
    if kind.blame == "suspects":
        return " The requests of the forward pass that failed become suspects."
    return " No request is suspected."


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("[[models]]", "`[[models]]`")
