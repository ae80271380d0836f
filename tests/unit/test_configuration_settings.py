"""The settings of a server's parts that are made from the values of its configuration."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import pytest

from mayfly_cli.config.keys import (
    DEFAULTS,
    SERVER,
    SHARED,
    TABLE,
    Values,
    build,
    keys_of,
    table,
)
from mayfly_cli.config.loading import ConfigurationError
from mayfly_cli.config.models import ConfiguredModel, aliases_of
from mayfly_protocol.options import Option
from mayfly_protocol.settings import LogSettings, WorkerSettings
from mayfly_reaper.settings import FrontEnd, Lifetime, Network, NodeSettings
from mayfly_server.settings import ConnectionLimits, FrontSettings
from support.config_values import other_value

PARTS: dict[type[Any], dict[str, Any]] = {
    FrontSettings: {},
    NodeSettings: {"node": "", "state_dir": Path(), "pools": ()},
    FrontEnd: {"command": ()},
    Network: {},
    LogSettings: {},
}
"""Settings of the parts, with their fields that have no default and are no keys."""


@pytest.mark.parametrize("part", PARTS)
def test_defaults_are_those_of_the_parts(part: type[Any]) -> None:
    assert build(part, DEFAULTS, **PARTS[part]) == part(**PARTS[part])


def test_defaults_of_a_model_are_those_of_its_workers() -> None:
    made = ConfiguredModel(table("a", {}), Path("/a"), "a").pool
    assert made.lifetime == Lifetime()
    assert made.workers == 1
    known = {field.name: field.default for field in fields(WorkerSettings)}
    assert {name: known[name] for name in made.options} == made.options


def test_nested_settings_are_made_too() -> None:
    front = build(FrontSettings, {**DEFAULTS, "max_headers": 99, "log_level": "debug"})
    assert front.connections == ConnectionLimits(max_headers=99)
    assert front.logs == LogSettings(level="debug")


def test_an_option_is_declared_once() -> None:
    @dataclass
    class Another:
        max_headers: Annotated[int, Option("Another meaning.")] = 1

    with pytest.raises(TypeError, match="another option max_headers"):
        keys_of(FrontSettings, Another)


COMMANDS_OWN = {"model", "name", "aliases", "models", "state_dir"}
"""Keys that the commands look at themselves."""


@pytest.mark.parametrize("name", sorted(SERVER.keys() - COMMANDS_OWN - SHARED.keys()))
def test_every_key_of_the_server_reaches_a_part(name: str) -> None:
    value = other_value(SERVER[name])
    value = Path(value) if SERVER[name].type is Path else value
    changed = {**DEFAULTS, name: value}
    takers = [part for part in PARTS if name in keys_of(part)]
    assert takers
    for part in takers:
        assert build(part, changed, **PARTS[part]) != build(part, DEFAULTS, **PARTS[part])


@pytest.mark.parametrize("name", SHARED)
def test_every_key_of_a_model_reaches_its_workers(name: str) -> None:
    value = other_value(TABLE[name])
    value = Path(value) if TABLE[name].type is Path else value

    def made(values: Values) -> Any:
        return ConfiguredModel(values, Path("/a"), "a").pool

    assert made(table("a", {name: value})) != made(table("a", {}))


def model(path: str, **values: Any) -> ConfiguredModel:
    return ConfiguredModel(table(path, values), Path("/") / path, path)


def test_names_and_aliases() -> None:
    models = [model("a", aliases=("x", "y")), model("b", name="bee", aliases=("z",))]
    assert aliases_of(models) == {"x": "a", "y": "a", "z": "bee"}
    for clash in (
        [model("a"), model("a")],
        [model("a"), model("b", name="a")],
        [model("a", aliases=("b",)), model("b")],
        [model("a", aliases=("x",)), model("b", aliases=("x",))],
        [model("a", aliases=("a",))],
    ):
        with pytest.raises(ConfigurationError, match="2 models would be called"):
            aliases_of(clash)


@pytest.mark.parametrize("name", ["a\x1b[31m", "a\nb", "\x9b2J", "a\u202eb"])
def test_S21_no_model_has_a_name_that_terminals_obey(name: str) -> None:
    for models in ([model(name)], [model("a", name=name)], [model("a", aliases=(name,))]):
        with pytest.raises(ConfigurationError, match="control characters") as caught:
            aliases_of(models)
        assert str(caught.value).isprintable()
    assert aliases_of([model("Qwen3 [4-bit] é")]) == {}
