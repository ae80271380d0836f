"""Finds the model that a name means, and fetches it if it is not on this machine.

This module imports neither MLX nor the Hub's client before it needs them: a model that is on this
machine is found at once.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from mayfly_protocol.common.model_names import folder_model_name
from mayfly_worker.fetch import demo, model_folder
from mayfly_worker.fetch.reporting import FetchError, Report

_DEMO = ("", "demo")


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this machine: its folder, and the ``name`` by which clients call the model."""

    path: Path
    name: str


def resolve(model: str, cache: Path, *, float32: bool, report: Report) -> LocalModel:
    """Finds a model on this machine or downloads it. ``float32`` stores the demo model's weights as
    float32, which happens in any case on a CPU.

    Raises:
        FetchError: the model can be neither found nor downloaded.
    """
    _require_mlx()
    if model in _DEMO:
        return LocalModel(demo.fetch(cache, float32=float32 or _on_cpu(), report=report), demo.NAME)
    found = _in_folder(model)
    if found is not None:
        return found
    from mayfly_worker.fetch import hub

    return LocalModel(hub.fetch(model, report), model)


def find(model: str, cache: Path) -> LocalModel:
    """Finds a model that is on this machine already; nothing is downloaded.

    Raises:
        FetchError: the model is not on this machine, or not all of it.
    """
    _require_mlx()
    if model in _DEMO:
        path = demo.folder(cache, float32=_on_cpu())
        if not demo.is_current(path):
            raise FetchError(
                "The demo model is not on this machine yet: `mayfly serve` fetches it."
            )
        return LocalModel(path, demo.NAME)
    found = _in_folder(model)
    if found is not None:
        return found
    from mayfly_worker.fetch import hub

    return LocalModel(hub.find(model), model)


def _require_mlx() -> None:
    if importlib.util.find_spec("mlx_lm") is None:
        raise FetchError(
            "MLX is not installed here. On Linux it comes with an extra: in Mayfly's checkout, "
            "pip install '.[cpu]' (or cuda12, cuda13)."
        )


def _in_folder(model: str) -> LocalModel | None:
    """Finds a model by its folder; None if ``model`` may be the name of a Hugging Face repository.
    Raises FetchError if ``model`` can be neither."""
    path = Path(model).expanduser()
    if path.is_dir():
        model_folder.check(path)
        return LocalModel(path.resolve(), folder_model_name(path))
    if path.exists():
        raise FetchError(f"{model} is a file. A model is a folder with config.json and weights.")
    if "huggingface.co/" in model:
        raise FetchError(
            f"{model} is an address. A model's name is what follows its host: owner/name."
        )
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise FetchError(f"There is no folder {model}.")
    return None


def _on_cpu() -> bool:
    import mlx.core as mx

    return mx.default_device() == mx.cpu
