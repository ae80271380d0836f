"""Finds the files of a model folder that hold the model's weights, without importing MLX.

A folder may have an index, ``model.safetensors.index.json``, which maps each tensor to its file.
Then the files ``model*.safetensors`` that the index names are the model, and no others: a file left
over from an earlier download has tensors of the same names and other values. (mlx-lm does not read
files of other names, such as ``mtp.safetensors``.) Without an index, all files
``model*.safetensors`` are the model, and no tensor may be in two of them.
"""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WEIGHTS = "model*.safetensors"
INDEX = "model.safetensors.index.json"

_MAX_HEADER = 100_000_000
"""Longest header of a safetensors file in bytes, by the format's definition."""


class ModelLoadError(Exception):
    """The model folder cannot be served as it is configured; loading it again would fail again."""


def weight_files(folder: Path) -> list[Path]:
    """Returns the files of ``folder`` that hold the model's weights: the files that the index
    names, whether they exist or not; without a readable index, all that mlx-lm would read."""
    try:
        named = _indexed(folder)
    except ModelLoadError:
        named = None
    return sorted(folder.glob(WEIGHTS)) if named is None else [folder / each for each in named]


def check_weights(folder: Path) -> None:
    """Checks that the weight files of ``folder`` are there and that each tensor is in one of them.

    Raises:
        ModelLoadError: there are no weights, the index is not valid or names a file that is
            missing, or two files hold a tensor of the same name.
    """
    named = _indexed(folder)
    files = weight_files(folder)
    if not files:
        among = f"{INDEX} names no file {WEIGHTS}" if named is not None else WEIGHTS
        raise ModelLoadError(f"{folder.name} has no weights that mlx-lm can load ({among})")
    missing = [file.name for file in files if not (file.exists() or file.is_symlink())]
    if missing:
        raise ModelLoadError(
            f"{folder.name} is incomplete: {len(missing)} of the weight files that {INDEX} names "
            f"are missing, the first is {missing[0]}; download the model again, or remove the "
            "index if it was left over from another version of the model"
        )
    holders: dict[str, str] = {}
    for file in files:
        for tensor in tensor_names(file):
            other = holders.setdefault(tensor, file.name)
            if other != file.name:
                remedy = "download the model again" if named else "remove what was left over"
                raise ModelLoadError(
                    f"{folder.name}: both {other} and {file.name} hold the tensor {tensor}, so "
                    f"that it is not clear which weights are the model's; {remedy}"
                )


def tensor_names(file: Path) -> list[str]:
    """Returns the names of a safetensors file's tensors; none if the file cannot be read as one,
    which MLX reports.

    Layout: a little-endian 64-bit length, that many bytes of JSON, the tensors' bytes.
    """
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(length)) if length <= _MAX_HEADER else {}
    except (OSError, ValueError, struct.error):
        return []
    return [name for name in header if name != "__metadata__"] if isinstance(header, dict) else []


@contextmanager
def only_weight_files(folder: Path) -> Iterator[Path]:
    """Context with a folder for mlx-lm, which reads all files named ``model*.safetensors``: the
    folder itself, or if these are not the model's weight files, a temporary folder of links to
    the files of ``folder`` without the others. Files opened in it stay readable after its end."""
    files = weight_files(folder)
    if sorted(files) == sorted(folder.glob(WEIGHTS)):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="mayfly-model-") as made:
        view = Path(made)
        for each in folder.iterdir():
            if each in files or not each.match(WEIGHTS):
                (view / each.name).symlink_to(each.absolute())
        yield view


def _indexed(folder: Path) -> list[str] | None:
    """Returns the names of the files ``model*.safetensors`` that the folder's index names; None if
    there is no index.

    Raises:
        ModelLoadError: the index cannot be read, or is no index.
    """
    path = folder / INDEX
    if not path.exists():
        return None
    try:
        index: Any = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{folder.name}: {INDEX} is not valid JSON: {error}") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ModelLoadError(
            f"{folder.name}: {INDEX} has no weight_map that maps tensors to files of this folder"
        )
    return sorted({name for name in names if Path(name).match(WEIGHTS)})
