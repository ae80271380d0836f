"""Names of models that are given by their folders; nodes and front ends derive the same ones."""

from __future__ import annotations

import os
import re
from pathlib import Path

_COMMIT = re.compile(r"[0-9a-f]{40}")
_REPOSITORY = "models--"


def folder_model_name(folder: Path) -> str:
    """Returns the name of the model in a folder: the folder's own name, or the link's if ``folder``
    is a link to one.

    In the Hugging Face cache, ``models--acme--tiny/snapshots/COMMIT`` is the model ``acme/tiny``;
    elsewhere, ``tiny/snapshots/COMMIT`` is the model ``tiny``.
    """
    path = Path(os.path.abspath(folder.expanduser()))  # noqa: PTH100 (resolve() follows links)
    if path.parent.name != "snapshots" or not _COMMIT.fullmatch(path.name):
        return path.name
    repository = path.parent.parent.name
    return repository.removeprefix(_REPOSITORY).replace("--", "/") or path.name
