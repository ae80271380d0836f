"""Starts one worker process, ``python -m mayfly_worker --settings JSON``; the reaper spawns it.

Most of the time until a worker serves a small model goes into its imports. They make a hundred
thousand objects that stay, in which the garbage collector would search in vain: it is off
meanwhile, and never searches them later. A full collection with all of them in it holds the GIL for
a tenth of a second, in which no token moves.

Where PyTorch is installed, transformers would import it for the sake of a tokenizer: 8 of the 12
seconds from a start to the weights, on a machine with a GPU. The worker computes nothing with it,
so its import is blocked, unless code that comes with the model may run: that may want it.
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
    weight_reader = WeightReader(weight_files(Path(settings.model_path)))
    if not settings.trust_remote_code:
        sys.modules["torch"] = None  # type: ignore[assignment]
    from mayfly_worker import process

    gc.freeze()
    gc.enable()
    process.main(settings, weight_reader)


if __name__ == "__main__":
    main()
