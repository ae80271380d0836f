"""Checks a model's folder (all files are whole) and the room on the disk, and locks a folder
against a second writer.

A folder is checked before anything is loaded, since the checks show half a download, or a folder of
the wrong type, far more clearly than MLX's errors do.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mayfly_worker.fetch.reporting import FetchError
from mayfly_worker.model.json_files import check_tokenizer_files
from mayfly_worker.model.weight_files import (
    WEIGHTS,
    ModelLoadError,
    check_weights,
    weight_files,
)

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "*.tiktoken", "tiktoken.model", "vocab.json")


def require_room(folder: Path, size: int) -> None:
    """Checks that the disk under ``folder`` (which may not exist yet) has ``size`` bytes free.

    Raises:
        FetchError: the disk has fewer bytes free.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < size:
        raise FetchError(
            f"Not enough room on the disk of {folder}: {in_units(size)} are needed and "
            f"{in_units(free)} are free."
        )


def in_units(size: int) -> str:
    """Returns a number of bytes as a text for people, such as "1.2 GB"."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Context in which this process holds the lock file ``path``; waits while another process holds
    it. The lock ends with its process, so a process that was killed blocks nobody."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def check(folder: Path) -> None:
    """Checks that ``folder`` has a configuration, a tokenizer, and all of its weight files, whole.

    Raises:
        FetchError: one of these is missing or cut short.
    """
    config = _json_object(folder / "config.json")
    if not ({"model_type", "model_file"} & config.keys()):
        raise FetchError(f"{folder / 'config.json'} names no model_type.")
    if not any(folder.glob(WEIGHTS)):
        raise FetchError(
            f"{folder} has no weights: no file is named {WEIGHTS}. Other formats (GGUF, PyTorch's "
            "bin) have to be converted first: python -m mlx_lm convert --help"
        )
    try:
        check_weights(folder)
        check_tokenizer_files(folder)
    except ModelLoadError as error:
        raise FetchError(f"{error}.") from error
    for path in weight_files(folder):
        _check_safetensors(path)
    if not any(any(folder.glob(pattern)) for pattern in TOKENIZERS):
        raise FetchError(f"{folder} has no tokenizer: none of {', '.join(TOKENIZERS)} is there.")


def _json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise FetchError(
            f"{path.parent} is not a model's folder: it has no {path.name}."
        ) from error
    except (OSError, ValueError) as error:
        raise FetchError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise FetchError(f"{path} does not hold a JSON object.")
    return value


def _check_safetensors(path: Path) -> None:
    """Checks, by a safetensors file's header, that the file ends where its last tensor ends.

    Layout: a little-endian 64-bit length, that many bytes of JSON, the tensors' bytes.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\xff"))
            header = json.loads(file.read(length)) if length <= size - 8 else None
    except (OSError, ValueError) as error:
        raise FetchError(f"{path} cannot be read: {error}") from error
    if not isinstance(header, dict):
        raise FetchError(
            f"{path} is not a safetensors file, or only its beginning. If it came by git, fetch "
            "it with: git lfs pull"
        )
    ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        raise FetchError(
            f"{path} has {size} bytes and should have {expected}: it was not downloaded to its "
            "end. Download it again."
        )
