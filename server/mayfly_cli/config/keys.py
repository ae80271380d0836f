"""Keys of the configuration, derived from the settings dataclasses of the server's parts.

A field of ``FrontSettings``, ``NodeSettings``, ``WorkerSettings`` or of a dataclass nested in them
is a key if it is annotated with an :class:`mayfly_protocol.options.Option`: the key ``max_rows`` is
the option ``--max-rows``, the variable ``MAYFLY_MAX_ROWS`` and a line of ``mayfly.toml``.
:func:`build` goes the other way, from the values of keys to such a dataclass. Times are seconds.

The command line reads this module at each start, so it imports nothing that takes long.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from mayfly_protocol.options import Option
from mayfly_protocol.settings import LogSettings, WorkerSettings
from mayfly_reaper.settings import FrontEnd, Network, NodeSettings, Pool
from mayfly_server.settings import FrontSettings

CONFIG_VARIABLE = "MAYFLY_CONFIG"
"""Environment variable that names the configuration file."""
PREFIX = "MAYFLY_"

Values = Mapping[str, Any]
"""Values by the names of their keys."""
T = TypeVar("T")

_NAME = "Name of the model for clients; by default its own name."


@dataclass(frozen=True, kw_only=True)
class ModelTable:
    """Keys that only a ``[[models]]`` table has."""

    path: Annotated[str, Option("The model's folder or Hugging Face repository id.")]
    name: Annotated[str | None, Option(_NAME)] = None
    aliases: Annotated[tuple[str, ...], Option("Other names that requests may use.")] = ()


@dataclass(frozen=True, kw_only=True)
class CommandSettings:
    """Keys that the commands use themselves."""

    model: Annotated[
        str | None,
        Option(
            "A model's folder or Hugging Face repository id. Without one a small demo model is "
            "served."
        ),
    ] = None
    name: Annotated[str | None, Option(_NAME)] = None
    aliases: Annotated[
        tuple[str, ...], Option("Other names of the model that requests may use.")
    ] = ()
    models: Annotated[
        tuple[Values, ...],
        Option("Several models instead of one: [[models]] tables in the file, elsewhere JSON."),
    ] = ()
    state_dir: Annotated[
        Path | None,
        Option(
            "Folder in which this server keeps its state; each server needs its own. By default "
            "the platform's state directory."
        ),
    ] = None


@dataclass(frozen=True)
class ConfigKey:
    """A key of the configuration. ``type`` is the type of its value without None; ``optional``
    means that None is its default."""

    name: str
    type: Any
    optional: bool
    default: Any
    one_of: tuple[Any, ...]
    declared: Option

    @property
    def flag(self) -> str:
        return self.declared.flag or "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    @property
    def is_list(self) -> bool:
        return bool(self.type == tuple[str, ...])


def keys_of(*settings: type[Any]) -> dict[str, ConfigKey]:
    """Returns the keys of settings dataclasses and of those nested in them, by name. Raises
    TypeError if a name is declared twice, in different ways."""
    found: dict[str, ConfigKey] = {}
    for each in settings:
        for _, part in _declarations(each):
            keys = [part] if isinstance(part, ConfigKey) else keys_of(part).values()
            for key in keys:
                if found.setdefault(key.name, key) != key:
                    raise TypeError(f"{each.__name__}: there is another option {key.name}")
    return found


def build(settings: type[T], values: Values, **others: Any) -> T:
    """Makes a settings dataclass from values of keys, with ``others`` for fields that are no keys
    or have another value. A field whose key has no value keeps its default."""
    return settings(**(field_values(settings, values) | others))


def field_values(settings: type[Any], values: Values) -> dict[str, Any]:
    """Returns the values of a settings dataclass's fields, from values of keys."""
    found: dict[str, Any] = {}
    for field, part in _declarations(settings):
        if not isinstance(part, ConfigKey):
            nested = field_values(part, values)
            if nested:
                found[field] = part(**nested)
        elif part.name in values:
            value, convert = values[part.name], part.declared.convert
            found[field] = value if convert is None or value is None else convert(value)
    return found


def _declarations(settings: type[Any]) -> tuple[tuple[str, ConfigKey | type[Any]], ...]:
    """Returns the fields of a dataclass that are keys or settings dataclasses themselves."""
    hints = get_type_hints(settings, include_extras=True)
    found: list[tuple[str, ConfigKey | type[Any]]] = []
    for field in fields(settings):
        hint = hints[field.name]
        options = [mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, Option)]
        if options:
            found.append((field.name, _key(field.name, field.default, hint.__origin__, *options)))
        elif isinstance(hint, type) and is_dataclass(hint):
            found.append((field.name, hint))
    return tuple(found)


def _key(field: str, default: Any, kind: Any, declared: Option) -> ConfigKey:
    members = [member for member in get_args(kind) if member is not type(None)]
    optional = type(None) in get_args(kind)
    kind = members[0] if optional else kind
    one_of = declared.one_of
    if get_origin(kind) is Literal:
        kind, one_of = str, get_args(kind)
    kind = declared.type or kind
    if declared.type is not None and default is not None:
        default = declared.type(default)
    return ConfigKey(
        name=declared.name or field.removesuffix("_s"),
        type=kind,
        optional=optional,
        default=default,
        one_of=one_of,
        declared=declared,
    )


_LOG = keys_of(LogSettings)
_POOL = keys_of(Pool)
_WORKER = {name: key for name, key in keys_of(WorkerSettings).items() if name not in _LOG}

SHARED: Mapping[str, ConfigKey] = {"workers": _POOL["workers"], **_WORKER, **_POOL}
"""Keys that may differ from model to model: outside of ``[[models]]`` they hold for every model
that sets nothing else."""
TABLE: Mapping[str, ConfigKey] = {**keys_of(ModelTable), **SHARED}
"""Keys of a ``[[models]]`` table."""
SERVER: Mapping[str, ConfigKey] = {
    **keys_of(CommandSettings, FrontEnd, Network, FrontSettings, NodeSettings),
    **SHARED,
}
"""Keys outside of the tables."""

_NETWORK = keys_of(Network)
_MODELS = {"model", "name", "aliases", "models"}

COMMANDS: Mapping[str, frozenset[str]] = {
    "serve": frozenset(SERVER) - {"nodes", *_NETWORK},
    "node": frozenset({*_MODELS, *_NETWORK, *keys_of(NodeSettings), *SHARED, "state_dir"}),
    "front": frozenset({*keys_of(FrontEnd, FrontSettings), "models", "state_dir", "stop_grace"}),
}
"""Names of the keys that a command uses. A file may hold any key: several commands share it."""

DEFAULTS: Values = {name: key.default for name, key in SERVER.items()}


def table(path: str, given: Values) -> Values:
    """Returns the values of a ``[[models]]`` table, with defaults for those that are not given."""
    return {**{name: key.default for name, key in TABLE.items()}, "path": path, **given}
