"""What becomes of what is set about a server."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from mayfly_cli.config import assembly
from mayfly_cli.config.assembly import Model
from mayfly_cli.config.keys import SERVER, SHARED, TABLE, ModelTable, ServerKeys
from mayfly_cli.config.loading import ConfigurationError
from mayfly_protocol.settings import WorkerSettings
from mayfly_reaper.settings import Budgets, Lifetime
from mayfly_server.settings import ConnectionLimits, FrontSettings
from support.configuration import another


def test_defaults_are_those_of_the_parts() -> None:
    keys = ServerKeys()
    assert assembly.budgets(keys) == Budgets()
    front = TypeAdapter(FrontSettings).validate_python(
        {**assembly.front_settings(keys, {}), "nodes": ()}
    )
    assert front == FrontSettings(nodes=())
    made = assembly.pool(Model(ModelTable(path="a"), Path("/a"), "a"))
    assert made.lifetime == Lifetime()
    assert made.workers == 1
    known = {field.name: field.default for field in fields(WorkerSettings)}
    assert {name: known[name] for name in made.options} == made.options
    assert front.connections == ConnectionLimits()


NODE = {
    "host",
    "port",
    "state_dir",
    "metrics_host",
    "metrics_port",
    "preload_blas",
    "caffeinate",
    "model",
    "name",
    "aliases",
    "models",
    "nodes",
    "control_host",
    "control_port",
    "worker_ports",
}
"""Keys that the command itself looks at."""


@pytest.mark.parametrize("name", sorted(SERVER.keys() - NODE - SHARED.keys()))
def test_every_key_of_the_server_reaches_a_part(name: str) -> None:
    def parts(keys: ServerKeys) -> Any:
        return asdict(assembly.budgets(keys)), assembly.front_settings(keys, {})

    value = another(SERVER[name])
    value = Path(value) if SERVER[name].type is Path else value
    assert parts(replace(ServerKeys(), **{name: value})) != parts(ServerKeys())


@pytest.mark.parametrize("name", SHARED)
def test_every_key_of_a_model_reaches_its_workers(name: str) -> None:
    table = ModelTable(path="a")
    value = another(TABLE[name])
    value = Path(value) if TABLE[name].type is Path else value

    def made(table: ModelTable) -> Any:
        return assembly.pool(Model(table, Path("/a"), "a"))

    assert made(replace(table, **{name: value})) != made(table)


def model(path: str, **table: Any) -> Model:
    return Model(ModelTable(path=path, **table), Path("/") / path, path)


def test_names_and_aliases() -> None:
    models = [model("a", aliases=("x", "y")), model("b", name="bee", aliases=("z",))]
    assert assembly.aliases_of(models) == {"x": "a", "y": "a", "z": "bee"}
    for clash in (
        [model("a"), model("a")],
        [model("a"), model("b", name="a")],
        [model("a", aliases=("b",)), model("b")],
        [model("a", aliases=("x",)), model("b", aliases=("x",))],
        [model("a", aliases=("a",))],
    ):
        with pytest.raises(ConfigurationError, match="2 models would be called"):
            assembly.aliases_of(clash)
