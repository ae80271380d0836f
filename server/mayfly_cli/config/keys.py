"""The keys of the configuration, derived from the settings dataclasses of all Mayfly packages.

A field of ``FrontSettings``, ``NodeSettings``, ``WorkerSettings`` or of a dataclass nested in them
is a key if it is annotated with an :class:`mayfly_protocol.options.Option`: the key ``max_rows`` is
the option ``--max-rows``, the variable ``MAYFLY_MAX_ROWS`` and a line of ``mayfly.toml``.
:func:`build` makes such a dataclass from the values of keys. Times are seconds.

Every start of the command ``mayfly`` imports this module, so it imports nothing that takes long.
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
"""Values of configuration keys, by the names of the keys."""
T = TypeVar("T")

_NAME = "Name of the model for clients; by default its own name."


@dataclass(frozen=True, kw_only=True)
class ModelTable:
    """Configuration keys that exist only inside of a ``[[models]]`` table of the configuration
    file."""

    path: Annotated[str, Option("The model's folder or Hugging Face repository id.")]
    name: Annotated[str | None, Option(_NAME)] = None
    aliases: Annotated[tuple[str, ...], Option("Other names that requests may use.")] = ()


@dataclass(frozen=True, kw_only=True)
class CommandSettings:
    """Configuration keys that the ``mayfly`` commands use themselves; no part of the server uses
    them."""

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
    """A key of the configuration, such as ``max_rows``.

    Attributes:
        type: the type of the key's value, without None.
        optional: True if the value may be None.
        one_of: the allowed values; empty if all values of the type are allowed.
        declared: the declaration on the field of a settings dataclass: help text and limits.
    """

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
    """Returns the configuration keys that settings dataclasses, and dataclasses nested in them,
    declare, by name. Raises TypeError if two different keys have the same name."""
    found: dict[str, ConfigKey] = {}
    for each in settings:
        for _, part in _declarations(each):
            keys = [part] if isinstance(part, ConfigKey) else keys_of(part).values()
            for key in keys:
                if found.setdefault(key.name, key) != key:
                    raise TypeError(f"{each.__name__}: there is another option {key.name}")
    return found


def build(settings: type[T], values: Values, **others: Any) -> T:
    """Makes an instance of a settings dataclass from the values of keys. ``others`` are the values
    of fields that are not keys, or that override a key's value. Fields without a value keep their
    defaults."""
    return settings(**(field_values(settings, values) | others))


def field_values(settings: type[Any], values: Values) -> dict[str, Any]:
    """Returns arguments for a settings dataclass, by field: the values of the fields' keys, in the
    fields' units and types. Fields whose keys have no value are left out."""
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
    """Returns the fields of a settings dataclass, each with its configuration key, or with its type
    if it is a nested settings dataclass. Other fields are left out."""
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
"""Keys that may differ from model to model. Outside of the ``[[models]]`` tables, a key's value
holds for every model whose table does not set the key."""
TABLE: Mapping[str, ConfigKey] = {**keys_of(ModelTable), **SHARED}
"""All keys that a ``[[models]]`` table may hold."""
SERVER: Mapping[str, ConfigKey] = {
    **keys_of(CommandSettings, FrontEnd, Network, FrontSettings, NodeSettings),
    **SHARED,
}
"""All keys that may stand outside of the ``[[models]]`` tables; each is also an option and a
variable."""

_NETWORK = keys_of(Network)
_MODELS = {"model", "name", "aliases", "models"}

COMMANDS: Mapping[str, frozenset[str]] = {
    "serve": frozenset(SERVER) - {"nodes", *_NETWORK},
    "node": frozenset({*_MODELS, *_NETWORK, *keys_of(NodeSettings), *SHARED, "state_dir"}),
    "front": frozenset({*keys_of(FrontEnd, FrontSettings), "models", "state_dir", "stop_grace"}),
}
"""Names of the keys that each command has as options. A configuration file may hold all keys,
because several commands share it."""

DEFAULTS: Values = {name: key.default for name, key in SERVER.items()}


def table(path: str, given: Values) -> Values:
    """Returns the values of all keys of a ``[[models]]`` table: the model's ``path``, the ``given``
    values, and the defaults of all other keys."""
    return {**{name: key.default for name, key in TABLE.items()}, "path": path, **given}
