"""Values for each key of the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mayfly_cli.config.keys import Key


def another(key: Key) -> Any:
    """A value that is not the default."""
    if key.name == "models":
        return [{"path": "org/a"}]
    if key.one_of is not None:
        return key.one_of[-1]
    if key.like is not None:
        return [key.like.example, "*"]
    if key.exists is not None:
        return "a-folder" if key.exists.folder else "a-file"
    if key.type is bool:
        return not key.default
    if key.type is int:
        return (key.default or 1000) + 1
    if key.type is float:
        return key.default + 1.5
    return ["x", "y"] if key.several else "a-folder" if key.type is Path else "else"
