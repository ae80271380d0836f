"""Reads the JSON files of a model folder, with errors that name the file and what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mayfly_worker.model.weight_files import ModelLoadError

_POINTER = b"version https://git-lfs.github.com/spec/"
_TOKENIZER = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json", "merges.txt")
"""Files that are too long to be parsed for a check; their beginning shows a pointer."""
_SMALL = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


def json_object(path: Path) -> dict[str, Any]:
    """Reads a file that has to hold a JSON object.

    Raises:
        ModelLoadError: the file cannot be read, or holds something else.
    """
    name = f"{path.parent.name}: {path.name}"
    _check_pointer(path)
    try:
        value: Any = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise ModelLoadError(
            f"{path.parent.name} is not a model folder: {path.name} is missing"
        ) from error
    except (ValueError, RecursionError, IsADirectoryError) as error:
        raise ModelLoadError(f"{name} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{name} does not hold a JSON object")
    return value


def check_tokenizer_files(folder: Path) -> None:
    """Checks that the files of a folder's tokenizer are files, and those that are short JSON.

    Raises:
        ModelLoadError: one of them is a folder, a pointer of git-lfs or no JSON object.
    """
    for name in _SMALL:
        if (folder / name).exists():
            json_object(folder / name)
    for name in _TOKENIZER:
        _check_pointer(folder / name)


def _check_pointer(path: Path) -> None:
    """Checks that a file, if it exists, was fetched from git-lfs and is no folder."""
    if path.is_dir():
        raise ModelLoadError(f"{path.parent.name}: {path.name} is a folder and should be a file")
    if not path.exists():
        return
    with path.open("rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise ModelLoadError(
                f"{path.parent.name}: {path.name} is a pointer of git-lfs and not the file itself; "
                "fetch it with: git lfs pull"
            )
