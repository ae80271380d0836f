"""A Llama that hangs once: the code of a model (``model_file``), to lie beside its config.json.

The forward pass that finds a file ``hang`` beside it takes that away and never returns, as one does
whose GPU has stopped answering. It waits without the interpreter's lock: other threads go on.
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
    """A copy of a model that can hang."""
    shutil.copytree(llama, folder)
    shutil.copy(__file__, folder / "model.py")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_file": "model.py"}))
    return folder
