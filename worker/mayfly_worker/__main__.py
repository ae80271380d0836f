"""``python -m mayfly_worker --settings JSON``: one worker process, spawned by a reaper.

Most of what a worker needs until it serves a small model is the time that its imports take. They
make a hundred thousand objects that stay, in which the garbage collector would search in vain: it
is off meanwhile, and never looks at them again. A full collection with all of them in it holds the
GIL for a tenth of a second, in which no token moves.

Where PyTorch is installed, transformers would import it for the sake of a tokenizer: 8 of the 12
seconds from a start to the weights, on a machine with a GPU. Nothing of a worker computes with it,
so there it is not to be found; but code that comes with a model may want it.
"""

import argparse
import gc
import sys
from pathlib import Path
from typing import NoReturn


def main() -> NoReturn:
    parser = argparse.ArgumentParser(prog="mayfly_worker", description=__doc__)
    parser.add_argument("--settings", required=True, help="WorkerSettings as JSON")
    given = parser.parse_args().settings
    gc.disable()
    from mayfly_protocol.settings import worker_settings
    from mayfly_worker.model.page_cache import WeightReader, weight_files

    settings = worker_settings().validate_json(given)
    warming = WeightReader(weight_files(Path(settings.model_path)))
    if not settings.trust_remote_code:
        sys.modules["torch"] = None  # type: ignore[assignment]
    from mayfly_worker import process

    gc.freeze()
    gc.enable()
    process.main(settings, warming)


if __name__ == "__main__":
    main()
