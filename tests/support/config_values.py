"""Makes valid values that differ from the defaults, for the keys of Mayfly's configuration file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mayfly_cli.config.keys import ConfigKey


def other_value(key: ConfigKey) -> Any:
    """Returns a valid value of a configuration key that differs from the key's default."""
    if key.name == "models":
        return [{"path": "org/a"}]
    if key.name == "worker_ports":
        return "7800-7899"
    if key.one_of:
        return key.one_of[-1]
    if key.declared.example:
        return [key.declared.example, "*"]
    if key.declared.exists:
        return f"a-{key.declared.exists}"
    if key.type is bool:
        return not key.default
    if key.type is int:
        return (key.default or 1000) + 1
    if key.type is float:
        return key.default + 1.5
    return ["x", "y"] if key.is_list else "a-folder" if key.type is Path else "else"
