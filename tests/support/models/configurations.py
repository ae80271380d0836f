"""Makes a tiny configuration of every model module of the installed mlx-lm, from the fields that
the module's ``ModelArgs`` declares and from the table in ``modules.toml``.

A module of a newer mlx-lm needs a table there, which is empty where the common values do.
"""

from __future__ import annotations

import importlib
import re
import tomllib
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import mlx_lm.models

Config = dict[str, Any]

TABLE = Path(__file__).with_name("modules.toml")
_TABLES: dict[str, Any] = tomllib.loads(TABLE.read_text("utf-8"))
_COMMON: Config = _TABLES["common"]
_MODULES: dict[str, Config] = _TABLES["modules"]


def modules() -> list[str]:
    """Returns the names of the installed mlx-lm's modules that define a model."""
    [folder] = mlx_lm.models.__path__
    return sorted(
        path.stem
        for path in Path(folder).glob("*.py")
        if re.search(r"^class ModelArgs\b", path.read_text("utf-8"), re.MULTILINE)
    )


def configuration(module: str) -> Config:
    """Returns a tiny configuration of one of mlx-lm's model modules.

    Raises:
        LookupError: the table has none for this module, or no value for one of its fields.
        SystemExit: the module ended the program when it was imported.
    """
    if module not in _MODULES:
        raise LookupError(
            f"no configuration of {module}: add a table [modules.{module}] to {TABLE.name}, empty "
            "or with what differs from [common]"
        )
    own = dict(_MODULES[module])
    if (text := own.get("text_config")) is not None:
        own["text_config"] = _text(dict(text))
    return {"model_type": module, **_filled(module, "ModelArgs", own)}


def _text(own: Config) -> Config:
    module, _, name = own.pop("of").partition(".")
    if not name:
        return configuration(module) | own
    return {"model_type": module, **_filled(module, name, own)}


def _filled(module: str, name: str, own: Config) -> Config:
    """Returns ``own`` and a value for each other field of a class that has a common value or no
    default."""
    values: Config = {}
    for field in fields(getattr(importlib.import_module(f"mlx_lm.models.{module}"), name)):
        if field.name in _COMMON:
            values[field.name] = _COMMON[field.name]
        elif field.default is MISSING and field.default_factory is MISSING:
            if str(field.type) in ("bool", "<class 'bool'>"):
                values[field.name] = False
            elif field.name != "model_type" and field.name not in own:
                if "Optional" in str(field.type) or "None" in str(field.type):
                    values[field.name] = None
                else:
                    raise LookupError(
                        f"no value for {field.name} of {module}: add one to [common] or "
                        f"[modules.{module}] of {TABLE.name}"
                    )
    return values | own
