"""The keys as options of a command, for Typer, which reads them from a signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mayfly_cli.config.keys import SERVER, Key
from mayfly_cli.failure import fail

if TYPE_CHECKING:
    from mayfly_cli.config.loading import Configuration

CONFIG_VARIABLE = "MAYFLY_CONFIG"

_CONFIG = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="The configuration file; by default mayfly.toml here, or else in the platform's "
        "configuration directory.",
        envvar=CONFIG_VARIABLE,
        show_envvar=False,
        exists=True,
        dir_okay=False,
    ),
]


def configured(config: Path | None, given: Mapping[str, Any]) -> Configuration:
    """What a command that takes the keys is to work with. Ends it where that makes no sense: as
    wrong usage, if an option is to blame."""
    from mayfly_cli.config.loading import ConfigurationError, load

    try:
        configuration = load(config, given)
    except ConfigurationError as error:
        if error.option is not None:
            raise typer.BadParameter(str(error)) from error
        fail(str(error))
    for note in configuration.notes:
        typer.echo(f"mayfly: {note}", err=True)
    return configuration


def with_keys(
    command: Callable[..., Any], names: Collection[str] = SERVER.keys()
) -> Callable[..., Any]:
    """A command that takes ``(config, given)`` as one that has the keys with these names as
    options. ``given`` holds the options that were given."""

    def run(config: Path | None, **options: Any) -> Any:
        given = {name: value for name, value in options.items() if value not in (None, [])}
        return command(config, given)

    parameters = [
        inspect.Parameter(
            key.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_of(key)
        )
        for key in SERVER.values()
        if key.name in names
    ]
    config = inspect.Parameter(
        "config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_CONFIG
    )
    every = [*parameters, config]
    run.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in every}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


def _of(key: Key) -> Any:
    if key.name == "model":
        return Annotated[str | None, typer.Argument(help=key.doc, show_default=False)]
    names = [key.option]
    if key.type is bool:
        names = [f"{key.option}/--no-{key.option.removeprefix('--')}"]
    bounds: dict[str, Any] = {}
    if key.type in (int, float):
        bounds = {"min": key.least, "max": key.most}
    if key.exists is not None:
        bounds = {
            "exists": True,
            "file_okay": not key.exists.folder,
            "dir_okay": key.exists.folder,
        }
    elif key.type is Path:
        bounds = {"file_okay": False}
    # A class made at run time has no name that a type checker could know.
    kind: Any = key.type if key.type in (bool, int, float, Path) else str
    if key.several:
        kind = list[str]
    option = typer.Option(*names, help=_help(key), show_default=False, **bounds)
    return Annotated[kind | None, option]


def _help(key: Key) -> str:
    parts = [key.doc]
    if key.one_of is not None:
        parts.append(f"One of {', '.join(map(str, key.one_of))}.")
    if key.several:
        parts.append("May be repeated.")
    # What is off, and what has no value, needs no word.
    if key.default and not key.optional:
        parts.append(f"(default: {str(key.default).lower()})")
    return " ".join(parts)
