"""A Llama whose forward pass hangs on demand: model code (``model_file``) for a model's folder.

The forward pass that finds a file named ``hang`` in the model's folder deletes the file and never
returns, like a forward pass on a GPU that has stopped answering. The pass sleeps without the
interpreter's lock, so the process's other threads go on.
"""

import contextlib
import json
import shutil
import time
from pathlib import Path
from typing import Any

from mlx_lm.models.llama import Model as Llama
from mlx_lm.models.llama import ModelArgs as ModelArgs

HANG = "hang"
_FILE = Path(__file__).with_name(HANG)


class Model(Llama):  # type: ignore[misc]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(FileNotFoundError):
            _FILE.unlink()
            while True:
                time.sleep(3600)
        return super().__call__(*args, **kwargs)


def build(llama: Path, folder: Path) -> Path:
    """Copies a Llama model to ``folder`` and makes the copy able to hang; returns ``folder``."""
    shutil.copytree(llama, folder)
    shutil.copy(__file__, folder / "model.py")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_file": "model.py"}))
    return folder
