"""``mayfly config``: prints a server's configuration as TOML, or writes a file with all keys."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mayfly_cli.config.keys import SERVER, TABLE, ConfigKey, Values
from mayfly_cli.config.options import configured, with_options
from mayfly_cli.failure import fail

if TYPE_CHECKING:
    from mayfly_cli.config.loading import Configuration

app = typer.Typer(name="config", no_args_is_help=True)

_WIDTH = 78

_HEAD = """\
# Configuration of `mayfly serve`, `mayfly node` and `mayfly front`. Every key is also an option
# (max_rows is --max-rows) and a variable (MAYFLY_MAX_ROWS); those are stronger than this file.
# Paths are relative to it, times are seconds. `mayfly config show` prints the values in force and
# the source of each.
"""
_MODELS = """\
# Several models, each with workers of its own. Keys that a table leaves out are taken from above.
#
# [[models]]
# path = "mlx-community/Qwen3-4B-4bit"
# name = "qwen"
# aliases = ["gpt-4o-mini"]
# workers = 2
"""


@app.callback()
def config() -> None:
    """Show a server's configuration, or begin a configuration file."""


def show(config: Path | None, given: Values) -> None:
    """Print the values in force as TOML, with the source of each.

    Takes the options of `mayfly serve`.
    """
    typer.echo(settings_toml(configured(config, given)), nl=False)


app.command()(with_options(show))


@app.command()
def init(
    file: Annotated[Path, typer.Argument(help="The file to write.", dir_okay=False)] = Path(
        "mayfly.toml"
    ),
) -> None:
    """Write a configuration file with every key in a comment."""
    try:
        with file.open("x", encoding="utf-8") as target:
            target.write(template())
    except FileExistsError:
        fail(f"{file} is there already")
    except OSError as error:
        fail(f"{file}: {error.strerror or error}")
    typer.echo(f"wrote {file}")


def settings_toml(configuration: Configuration) -> str:
    """Returns the configuration's values as TOML, with the source of each value in a comment. The
    TOML is a valid configuration file with these values."""
    lines = [
        (_line(key, configuration.values[name]), configuration.origins.get(name, "default"))
        for name, key in SERVER.items()
        if name != "models"
    ]
    width = max(len(line) for line, _ in lines)
    text = "\n".join(f"{line:<{width}}  # {origin}" for line, origin in lines) + "\n"
    for table in configuration.values["models"]:
        text += f"\n[[models]]  # {configuration.origins['models']}\n"
        text += "".join(f"{_line(key, table[name])}\n" for name, key in TABLE.items())
    return text


def template() -> str:
    """Returns the text of a configuration file in which every key is a comment, with its default
    value."""
    blocks = [_block(key) for key in SERVER.values() if key.name != "models"]
    return "\n".join([_HEAD, *blocks, _MODELS])


def _block(key: ConfigKey) -> str:
    text = key.declared.help
    if key.one_of:
        text += f" One of {', '.join(map(str, key.one_of))}."
    return "\n".join([*_comment(text), f"# {_line(key, key.default).removeprefix('# ')}", ""])


def _comment(text: str) -> Iterator[str]:
    yield from textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# ")


def _line(key: ConfigKey, value: Any) -> str:
    """Returns the line ``key = value``. If the value is None, it is a comment, since TOML has no
    null."""
    return f"# {key.name} =" if value is None else f"{key.name} = {toml(value)}"


def toml(value: Any) -> str:
    """Formats a configuration value (bool, number, list, path or text) as TOML."""
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case tuple() | list():
            return f"[{', '.join(map(toml, value))}]"
        case Path():
            return toml(str(value))
        case _:
            # A JSON string is a TOML string, except for the character U+007F.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
