"""Entry point of one worker process, ``python -m mayfly_worker --settings JSON``, which the reaper
(the supervisor process) spawns.

Most of the time until a worker serves a small model goes into its imports. The imports make a
hundred thousand objects that stay, in which the garbage collector would search in vain: the
collector is off during the imports and never searches these objects later (``gc.freeze``). A full
collection over all of them would hold the GIL for a tenth of a second, in which no token is
generated.

Where PyTorch is installed, transformers would import it for the sake of a tokenizer: 8 of the 12
seconds from the start of the process to the loading of the weights, on a machine with a GPU. The
worker computes nothing with PyTorch, so its import is blocked, unless Python code that comes with
the model may run, since such code may need PyTorch.
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
    from mayfly_worker.model.page_cache import WeightReader
    from mayfly_worker.model.weight_files import weight_files

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
