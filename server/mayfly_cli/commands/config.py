"""``mayfly config``: what a server is configured to be.

The configuration as TOML: as it is, and as it could be.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mayfly_cli.config.keys import SERVER, TABLE, Key
from mayfly_cli.config.options import configured, with_keys
from mayfly_cli.failure import fail

if TYPE_CHECKING:
    from mayfly_cli.config.loading import Configuration

_WIDTH = 78
_SET_LATER = "default"

_HEAD = """\
# How `mayfly serve`, `mayfly node` and `mayfly front` are configured. Every key is an option, too
# (max_rows is --max-rows) and a variable (MAYFLY_MAX_ROWS); those are stronger than this file.
# Paths are relative to it, times are seconds. `mayfly config show` prints what is in force, and
# where it came from.
"""
_MODELS = """\
# Several models, each with workers of its own. What a table leaves out is taken from above.
#
# [[models]]
# path = "mlx-community/Qwen3-4B-4bit"
# name = "qwen"
# aliases = ["gpt-4o-mini"]
# workers = 2
"""


def settings_toml(configuration: Configuration) -> str:
    """The values in force, with where each came from: TOML that says the same again."""
    lines = [
        _line(key, getattr(configuration.keys, name), configuration.origins.get(name, _SET_LATER))
        for name, key in SERVER.items()
        if name != "models"
    ]
    width = max(len(value) for value, _ in lines)
    text = "\n".join(f"{value:<{width}}  # {origin}" for value, origin in lines) + "\n"
    for table in configuration.keys.models:
        origin = configuration.origins["models"]
        text += f"\n[[models]]  # {origin}\n" + "".join(
            f"{_line(key, getattr(table, name), '')[0]}\n" for name, key in TABLE.items()
        )
    return text


def template() -> str:
    """A file that says everything there is to say, in comments."""
    blocks = [_block(key) for key in SERVER.values() if key.name != "models"]
    return "\n".join([_HEAD, *blocks, _MODELS])


def _block(key: Key) -> str:
    doc = key.doc if key.one_of is None else f"{key.doc} One of {_listed(key.one_of)}."
    return "\n".join([*_comment(doc), f"# {_line(key, key.default, '')[0].removeprefix('# ')}", ""])


def _comment(text: str) -> Iterator[str]:
    yield from textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# ")


def _listed(values: tuple[Any, ...]) -> str:
    return ", ".join(map(str, values))


def _line(key: Key, value: Any, origin: str) -> tuple[str, str]:
    """What has no value is a comment, for TOML has no null."""
    if value is None:
        return f"# {key.name} =", origin
    return f"{key.name} = {toml(value)}", origin


def toml(value: Any) -> str:
    """A value of one of the keys' types."""
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
            # JSON's strings are TOML's, but for U+007F.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


app = typer.Typer(name="config", no_args_is_help=True)


@app.callback()
def config() -> None:
    """Show or begin a configuration."""


def show(config: Path | None, given: Mapping[str, Any]) -> None:
    """Print the values in force as TOML, and where each came from.

    Takes the options of `mayfly serve`.
    """
    pass

    configuration = configured(config, given)
    typer.echo(settings_toml(configuration), nl=False)


app.command()(with_keys(show))


@app.command()
def init(
    file: Annotated[Path, typer.Argument(help="The file to write.", dir_okay=False)] = Path(
        "mayfly.toml"
    ),
) -> None:
    """Write a configuration file with every key in a comment."""
    pass

    try:
        with file.open("x", encoding="utf-8") as target:
            target.write(template())
    except FileExistsError:
        fail(f"{file} is there already")
    except OSError as error:
        fail(f"{file}: {error.strerror or error}")
    typer.echo(f"wrote {file}")
