"""Values for the keys, and where each came from.

An option is stronger than a variable, a variable than the file, the file than the default. What
the file says about paths is relative to where the file is.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import platformdirs
from pydantic import TypeAdapter, ValidationError, create_model
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict

from mayfly_cli.config.keys import SERVER, SHARED, TABLE, Key, ModelKeys, ModelTable, ServerKeys
from mayfly_cli.config.options import CONFIG_VARIABLE
from mayfly_protocol.common.secrets import SECRET_VARIABLES

FILE_NAME = "mayfly.toml"
_PREFIX = "MAYFLY_"


class ConfigurationError(Exception):
    """What is configured makes no sense. ``option`` names the option that is to blame, where it is
    one; the text is for the operator."""

    def __init__(self, message: str, option: str | None = None) -> None:
        super().__init__(message)
        self.option = option


@dataclass(frozen=True)
class Configuration:
    """``origins`` says where the keys that have no default value came from: ``--port``,
    ``MAYFLY_PORT``, or the file's path. ``notes`` are for the operator."""

    keys: ServerKeys
    origins: Mapping[str, str]
    file: Path | None
    notes: tuple[str, ...] = ()

    @property
    def models(self) -> tuple[ModelTable, ...]:
        """What to serve: at least one."""
        keys = self.keys
        if keys.models:
            return keys.models
        inherited = {field.name: getattr(keys, field.name) for field in fields(ModelKeys)}
        table = ModelTable(path=keys.model or "", name=keys.name, aliases=keys.aliases, **inherited)
        return (table,)


def load(config: Path | None, given: Mapping[str, Any]) -> Configuration:
    """The values for all keys. ``given`` are options by their keys.

    Raises:
        ConfigurationError: a value that is none, an unknown key, a file that is no TOML.
    """
    file = config or _found()
    sources = [
        _Source(given, lambda key: key.option),
        _Source(EnvSettingsSource(_settings())(), lambda key: key.variable),
    ]
    if file is not None:
        where = str(file)
        sources.append(_Source(_from_file(file), lambda _: where))
    values, origins = _merged(sources)
    keys = _validated(values, origins)
    _check(keys, origins)
    return Configuration(keys, origins, file, tuple(_strangers(os.environ)))


@dataclass(frozen=True)
class _Source:
    values: Mapping[str, Any]
    name: Callable[[Key], str]
    """Where a key's value came from."""


def _found() -> Path | None:
    here = Path(FILE_NAME)
    usual = platformdirs.user_config_path("mayfly") / FILE_NAME
    return next((path.resolve() for path in (here, usual) if path.is_file()), None)


def _merged(sources: Iterable[_Source]) -> tuple[dict[str, Any], dict[str, str]]:
    """The strongest source's value for each key. One model and several exclude each other: the
    stronger source decides."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    every = SERVER
    for source in sources:
        both = {"model", "models"} & source.values.keys()
        if len(both) > 1:
            raise ConfigurationError(
                f"{source.name(every['model'])}: model and models exclude each other; take one out"
            )
        for name, value in source.values.items():
            decided = name in ("model", "models") and {"model", "models"} & values.keys()
            if name not in values and not decided:
                values[name] = value
                origins[name] = source.name(every[name])
    return values, origins


# The environment


@cache
def _settings() -> type[BaseSettings]:
    """The keys as pydantic-settings finds them in the environment; what they mean is looked at
    later, once for all sources."""
    texts: dict[str, Any] = dict.fromkeys(SERVER, (str | None, None))
    return create_model("Settings", __base__=_Settings, **texts)


class _Settings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix=_PREFIX, env_ignore_empty=True)


def _strangers(environment: Mapping[str, str]) -> Iterator[str]:
    """Variables that look like ours and are none. Others may have set them (Kubernetes does for
    each service), so that they are no errors."""
    known = {key.variable for key in SERVER.values()}
    known |= {*SECRET_VARIABLES, CONFIG_VARIABLE}
    for name in sorted(environment):
        if name.startswith(_PREFIX) and name not in known:
            yield f"the variable {name} means nothing{_nearest(name, known)}"


# The file


def _from_file(file: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(file.read_text("utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file} is no TOML: {error}") from error
    for name in values:
        if name not in SERVER:
            raise ConfigurationError(f"{file}: {_unknown(name, SERVER)}")
    if isinstance(values.get("model"), list | dict):
        raise ConfigurationError(f"{file}: model is the name of one; tables are [[models]]")
    _place(values, SERVER.values(), file.parent)
    tables = values.get("models")
    for table in tables if isinstance(tables, list) else ():
        if isinstance(table, dict):
            _place(table, TABLE.values(), file.parent)
    return values


def _place(values: dict[str, Any], keys: Iterable[Key], folder: Path) -> None:
    """Makes the file's paths absolute. A model may also be a repository's name."""
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


# What is wrong with values

_adapter: TypeAdapter[ServerKeys] = TypeAdapter(ServerKeys)


def _validated(values: Mapping[str, Any], origins: Mapping[str, str]) -> ServerKeys:
    values = {name: _parsed(name, value, origins) for name, value in values.items()}
    shared = {name: values[name] for name in SHARED if name in values}
    if "models" in values:
        values["models"] = [shared | table for table in values["models"]]
    try:
        return _adapter.validate_python(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise _error(first["loc"], first["msg"], origins) from error


def _parsed(name: str, value: Any, origins: Mapping[str, str]) -> Any:
    """Outside of the file, several values are one text with commas, and models are JSON."""
    if name == "models":
        return _tables(value, origins)
    if SERVER[name].several and isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


def _tables(value: Any, origins: Mapping[str, str]) -> list[dict[str, Any]]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise _error(("models",), f"no JSON: {error}", origins) from error
    if not isinstance(value, list) or not all(isinstance(table, dict) for table in value):
        raise _error(("models",), "they are a list of tables, each under [[models]]", origins)
    for number, table in enumerate(value):
        for name in table:
            if name not in TABLE:
                raise _error(("models", number), _unknown(name, TABLE), origins)
    return value


def _check(keys: ServerKeys, origins: Mapping[str, str]) -> None:
    """What a type cannot say."""
    _check_values(keys, SERVER.values(), (), origins)
    for number, table in enumerate(keys.models):
        _check_values(table, TABLE.values(), ("models", number), origins)
    if keys.models:
        for name in ("name", "aliases"):
            if getattr(keys, name):
                raise _error((name,), "goes with a single model; say it in [[models]]", origins)


def _check_values(
    values: ModelKeys, keys: Iterable[Key], place: tuple[Any, ...], origins: Mapping[str, str]
) -> None:
    for key in keys:
        value = getattr(values, key.name)
        at = (*place, key.name)
        if value is None:
            continue
        if key.one_of is not None and value not in key.one_of:
            raise _error(at, f"{value} is not one of {', '.join(map(str, key.one_of))}", origins)
        if key.like is not None:
            for text in value:
                if not re.fullmatch(key.like.pattern, text):
                    problem = f"{text!r} has another form than {key.like.example}"
                    raise _error(at, problem, origins)
        if key.exists is not None:
            path = Path(value).expanduser()
            if not (path.is_dir() if key.exists.folder else path.is_file()):
                what = "folder" if key.exists.folder else "file"
                raise _error(at, f"there is no {what} {path}", origins)


def _error(place: tuple[Any, ...], problem: str, origins: Mapping[str, str]) -> ConfigurationError:
    name = str(place[0])
    origin = origins.get(name, name)
    option = origin if origin.startswith("--") else None
    inside = ".".join(str(part) for part in place[1:])
    within = f" {inside}" if inside else ""
    where = origin if option or origin.startswith(_PREFIX) else f"{origin}: {name}"
    return ConfigurationError(f"{where}{within}: {problem}", option)
