"""Command-line options, made from the keys of the configuration. Typer reads a function's
signature, so a signature is made that has a parameter for each option.

The texts and limits of the options are declared on the fields of the settings dataclasses, in the
modules ``settings.py`` of the packages mayfly_protocol, mayfly_reaper and mayfly_server.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mayfly_cli.config.keys import CONFIG_VARIABLE, SERVER, ConfigKey, Values
from mayfly_cli.failure import fail

if TYPE_CHECKING:
    from mayfly_cli.config.loading import Configuration

_CONFIG = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="The configuration file; by default mayfly.toml in this folder, or else in the "
        "platform's configuration directory. Only a file that is named here may run a model's code "
        "or open the server to others.",
        envvar=CONFIG_VARIABLE,
        show_envvar=False,
        exists=True,
        dir_okay=False,
    ),
]


def configured(config: Path | None, given: Values) -> Configuration:
    """Loads the configuration of a command from its options ``given``, the environment and a file.
    Ends the command if the configuration is invalid: with exit code 2 if the invalid value is an
    option's, otherwise with 1."""
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


def with_options(
    command: Callable[[Path | None, Values], Any], names: Collection[str] = SERVER.keys()
) -> Callable[..., Any]:
    """Turns a function that takes ``(config, given)`` into a Typer command that has ``--config``
    and an option for each configuration key in ``names``. ``given`` holds the values of the options
    that are on the command line."""

    def run(config: Path | None, **options: Any) -> Any:
        given = {name: value for name, value in options.items() if value not in (None, [])}
        return command(config, given)

    keys = [key for key in SERVER.values() if key.name in names]
    hints = {**{key.name: _annotation(key) for key in keys}, "config": _CONFIG}
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint)
            for name, hint in hints.items()
        ]
    )
    run.__annotations__ = hints
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


def typer_option(key: ConfigKey, **others: Any) -> Any:
    """Makes the Typer option of a configuration key; ``others`` are more arguments of
    typer.Option."""
    declared = key.declared
    names = [key.flag, *declared.aliases]
    if key.type is bool:
        names = [f"{name}/--no-{name.removeprefix('--')}" for name in names]
    checks: dict[str, Any] = {}
    if key.type in (int, float):
        checks = {"min": declared.at_least, "max": declared.at_most}
    elif declared.exists:
        folder = declared.exists == "folder"
        checks = {"exists": True, "file_okay": not folder, "dir_okay": folder}
    elif key.type is Path:
        checks = {"file_okay": False}
    return typer.Option(*names, help=_help(key), show_default=False, **(checks | others))


def _annotation(key: ConfigKey) -> Any:
    if key.name == "model":
        return Annotated[str | None, typer.Argument(help=key.declared.help, show_default=False)]
    kind: Any = key.type if key.type in (bool, int, float, Path) else str
    return Annotated[(list[str] if key.is_list else kind) | None, typer_option(key)]


def _help(key: ConfigKey) -> str:
    parts = [key.declared.help]
    if key.one_of:
        parts.append(f"One of {', '.join(map(str, key.one_of))}.")
    if key.is_list:
        parts.append("May be repeated.")
    # The help names no default that is false, zero, empty or missing.
    if key.default and not key.optional:
        parts.append(f"(default: {str(key.default).lower()})")
    return " ".join(parts)
