"""Loading of the configuration: the value of every key, and the source of each value.

A key's value is taken from the command's option, or else the environment variable, or else the
configuration file, or else the default. Paths in the file are relative to the file's folder.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any, Required

import platformdirs
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, create_model
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict
from typing_extensions import TypedDict

from mayfly_cli.config.keys import (
    CONFIG_VARIABLE,
    DEFAULTS,
    PREFIX,
    SERVER,
    SHARED,
    TABLE,
    ConfigKey,
    Values,
    table,
)
from mayfly_protocol.common.secrets import SECRET_VARIABLES

FILE_NAME = "mayfly.toml"


class ConfigurationError(Exception):
    """The configuration is invalid; the text tells the operator why. ``option`` is the command-line
    option with the invalid value, None if the value has another source."""

    def __init__(self, message: str, option: str | None = None) -> None:
        super().__init__(message)
        self.option = option


@dataclass(frozen=True)
class Configuration:
    """The loaded configuration: the values of all keys.

    Attributes:
        origins: the source of each value that is not a default: an option (``--port``), a variable
            (``MAYFLY_PORT``), or the path of the configuration file.
        file: the configuration file, if there is one.
        notes: warnings for the operator.
    """

    values: Values
    origins: Mapping[str, str]
    file: Path | None
    notes: tuple[str, ...] = ()

    @property
    def models(self) -> tuple[Values, ...]:
        """The values of the keys of each model to serve: one model for each ``[[models]]`` table;
        without tables, the one model that the key ``model`` names."""
        values = self.values
        if values["models"]:
            return tuple(values["models"])
        own = {name: values[name] for name in ("name", "aliases", *SHARED)}
        return (table(values["model"] or "", own),)


def load(config: Path | None, given: Values) -> Configuration:
    """Reads the values of all keys from the ``given`` options, the environment and the ``config``
    file (by default the usual ``mayfly.toml``, if it exists).

    Raises:
        ConfigurationError: an invalid value, an unknown key, a file that is not TOML, or a guarded
            key in a file that was only found in the working directory.
    """
    file = config or _found_file()
    notes = list(_unknown_variables(os.environ))
    sources = [
        _Source(given, lambda key: key.flag),
        _Source(EnvSettingsSource(_environment_settings())(), lambda key: key.variable),
    ]
    if file is not None:
        where = str(file)
        sources.append(_Source(_from_file(file), lambda _: where))
        if config is None:
            notes.append(f"the configuration is read from {file}")
    values, origins = _merged(sources)
    validated = {**DEFAULTS, **_validated(values, origins)}
    _check(validated, origins)
    if file is not None and config is None and file.parent == Path.cwd().resolve():
        in_force = {n: v for n, v in sources[-1].values.items() if origins.get(n) == str(file)}
        _check_guarded(file, in_force)
    return Configuration(validated, origins, file, tuple(notes))


@dataclass(frozen=True)
class _Source:
    values: Values
    name: Callable[[ConfigKey], str]
    """Returns the text that names this source of a key's value, such as ``--port`` for an
    option."""


def _found_file() -> Path | None:
    here = Path(FILE_NAME)
    usual = platformdirs.user_config_path("mayfly") / FILE_NAME
    return next((path.resolve() for path in (here, usual) if path.is_file()), None)


def _merged(sources: Iterable[_Source]) -> tuple[dict[str, Any], dict[str, str]]:
    """Takes each key's value from the first of the ``sources`` that has it. Returns the values, and
    the names of their sources. ``model`` and ``models`` exclude each other: if one source has
    ``model`` and another has ``models``, only the key of the earlier source is taken."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for source in sources:
        both = {"model", "models"} & source.values.keys()
        if len(both) > 1:
            raise ConfigurationError(
                f"{source.name(SERVER['model'])}: model and models exclude each other; take one out"
            )
        for name, value in source.values.items():
            decided = name in ("model", "models") and {"model", "models"} & values.keys()
            if name not in values and not decided:
                values[name] = value
                origins[name] = source.name(SERVER[name])
    return values, origins


# The environment


class _EnvironmentSettings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix=PREFIX, env_ignore_empty=True)


@cache
def _environment_settings() -> type[BaseSettings]:
    """Makes the class by which pydantic-settings reads the environment variables of all keys, as
    texts. The texts are validated later, together with the values from other sources."""
    texts: dict[str, Any] = dict.fromkeys(SERVER, (str | None, None))
    return create_model("Settings", __base__=_EnvironmentSettings, **texts)


def _unknown_variables(environment: Mapping[str, str]) -> Iterator[str]:
    """Yields a warning for each environment variable that begins with ``MAYFLY_`` but belongs to no
    key. It is not an error, because other programs set such variables: Kubernetes does so for each
    service."""
    known = {key.variable for key in SERVER.values()}
    known |= {*SECRET_VARIABLES, CONFIG_VARIABLE}
    for name in sorted(environment):
        if name.startswith(PREFIX) and name not in known:
            yield f"the environment variable {name} is not known{_nearest(name, known)}"


# The file


def _from_file(file: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(file.read_text("utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file} is not TOML: {error}") from error
    for name in values:
        if name not in SERVER:
            raise ConfigurationError(f"{file}: {_unknown(name, SERVER)}")
    if isinstance(values.get("model"), list | dict):
        raise ConfigurationError(f"{file}: model is the name of one model; tables are [[models]]")
    _make_paths_absolute(values, SERVER.values(), file.parent)
    tables = values.get("models")
    for each in tables if isinstance(tables, list) else ():
        if isinstance(each, dict):
            _make_paths_absolute(each, TABLE.values(), file.parent)
    return values


def _check_guarded(file: Path, values: Values) -> None:
    """Raises ConfigurationError if the values of a file in the working directory, which may be
    anybody's, run code or open the server to others."""
    tables = values.get("models")
    for each in (values, *(tables if isinstance(tables, list) else ())):
        for name, key in (TABLE if each is not values else SERVER).items():
            value = each.get(name, key.default)
            value = tuple(value) if isinstance(value, list) else value
            if key.declared.guarded and value != key.default:
                raise ConfigurationError(
                    f"{file}: {name} is taken only from a file that is named, because it can run "
                    f"code or open the server to others; if you trust this file, start with "
                    f"--config {FILE_NAME}"
                )


def _make_paths_absolute(values: dict[str, Any], keys: Iterable[ConfigKey], folder: Path) -> None:
    """Makes the paths among a configuration file's values absolute; they are relative to
    ``folder``, the folder of the file. A model that is not the path of a folder is the id of a
    repository and is left as it is."""
    for key in keys:
        value = values.get(key.name)
        if not isinstance(value, str):
            continue
        path = folder / Path(value).expanduser()
        if key.type is Path or (key.name in ("model", "path") and path.is_dir()):
            values[key.name] = str(path)


def _unknown(name: str, known: Iterable[str]) -> str:
    return f"there is no key {name!r}{_nearest(name, known)}"


def _nearest(name: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""


# Validation


@cache
def _adapter() -> TypeAdapter[dict[str, Any]]:
    """Makes pydantic's validator for the types and ranges of the keys' values. Its result holds
    only the keys that have a value."""
    tables = _typed_dict("Table", {**_hints(TABLE), "path": Required[_hint(TABLE["path"])]})
    server = {**_hints(SERVER), "models": GenericAlias(list, (tables,))}
    return TypeAdapter(_typed_dict("Server", server))


def _typed_dict(name: str, hints: dict[str, Any]) -> Any:
    make: Any = TypedDict  # the keys are known at run time only
    made = make(name, hints, total=False)
    made.__pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)
    return made


def _hints(keys: Mapping[str, ConfigKey]) -> dict[str, Any]:
    return {name: _hint(key) for name, key in keys.items()}


def _hint(key: ConfigKey) -> Any:
    kind = key.type | None if key.optional else key.type
    if key.type in (int, float):
        return Annotated[kind, Field(ge=key.declared.at_least, le=key.declared.at_most)]
    return kind


def _validated(values: Values, origins: Mapping[str, str]) -> dict[str, Any]:
    parsed = {name: _parsed(name, value, origins) for name, value in values.items()}
    shared = {name: parsed[name] for name in SHARED if name in parsed}
    if "models" in parsed:
        parsed["models"] = [shared | each for each in parsed["models"]]
    try:
        validated = _adapter().validate_python(parsed)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise _error(first["loc"], first["msg"], origins) from error
    tables = validated.get("models", ())
    return {**validated, "models": tuple(table(each["path"], each) for each in tables)}


def _parsed(name: str, value: Any, origins: Mapping[str, str]) -> Any:
    """Parses a key's text from a variable or option: lists are separated by commas, and ``models``
    is JSON. Other values are returned unchanged. ``origins`` holds the source of each key's value,
    for errors."""
    if name == "models":
        return _tables(value, origins)
    if SERVER[name].is_list and isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


def _tables(value: Any, origins: Mapping[str, str]) -> list[dict[str, Any]]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise _error(("models",), f"not JSON: {error}", origins) from error
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise _error(("models",), "has to be a list of tables, each under [[models]]", origins)
    for number, each in enumerate(value):
        for name in each:
            if name not in TABLE:
                raise _error(("models", number), _unknown(name, TABLE), origins)
    return value


def _check(values: Values, origins: Mapping[str, str]) -> None:
    """Checks allowed values, patterns, the existence of files, and keys that exclude each other.
    Raises ConfigurationError for the first wrong value; ``origins`` holds the source of each value,
    which the error names."""
    _check_values(values, SERVER.values(), (), origins)
    for number, each in enumerate(values["models"]):
        _check_values(each, TABLE.values(), ("models", number), origins)
    if values["models"]:
        for name in ("name", "aliases"):
            if values[name]:
                problem = "goes with a single model; give it in [[models]]"
                raise _error((name,), problem, origins)


def _check_values(
    values: Values, keys: Iterable[ConfigKey], place: tuple[Any, ...], origins: Mapping[str, str]
) -> None:
    for key in keys:
        value, declared = values[key.name], key.declared
        at = (*place, key.name)
        if value is None:
            continue
        if key.one_of and value not in key.one_of:
            raise _error(at, f"{value} is not one of {', '.join(map(str, key.one_of))}", origins)
        if declared.pattern:
            for text in value:
                if not re.fullmatch(declared.pattern, text):
                    problem = f"{text!r} does not have the form of {declared.example}"
                    raise _error(at, problem, origins)
        if declared.exists:
            path = Path(value).expanduser()
            if not (path.is_dir() if declared.exists == "folder" else path.is_file()):
                raise _error(at, f"there is no {declared.exists} {path}", origins)


def _error(place: tuple[Any, ...], problem: str, origins: Mapping[str, str]) -> ConfigurationError:
    name = str(place[0])
    origin = origins.get(name, name)
    option = origin if origin.startswith("--") else None
    inside = ".".join(str(part) for part in place[1:])
    within = f" {inside}" if inside else ""
    where = origin if option or origin.startswith(PREFIX) else f"{origin}: {name}"
    return ConfigurationError(f"{where}{within}: {problem}", option)
