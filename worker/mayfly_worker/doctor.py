"""Reports if a model fits this machine, without loading the model::

    python -m mayfly_worker.doctor [MODEL] --cache DIR [--options JSON]

The model is assembled as for serving, with its weights still on the disk, and one forward pass is
built but not computed: that is enough to know the shape and type of every array, KV caches
included. From these sizes follows the number of sequences that may run at once, by the same
arithmetic by which a worker admits requests.

The program writes one JSON object to stdout: a :class:`Diagnosis`, with exit code 0, or ``{"error":
sentences}``, with exit code 3. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mayfly_protocol.capabilities import shown
from mayfly_protocol.lifecycle import Exit
from mayfly_protocol.settings import WorkerSettings
from mayfly_worker.engine.admission import Budget
from mayfly_worker.fetch.reporting import FetchError, claim_stdout
from mayfly_worker.fetch.resolve import find
from mayfly_worker.model import memory
from mayfly_worker.model.capabilities import capabilities_of
from mayfly_worker.model.loading import assemble, cache_factory, run_errors
from mayfly_worker.model.probe import kv_cost
from mayfly_worker.model.weight_files import ModelLoadError, weight_files

CONTEXTS = (2048, 8192, 32768)
"""Context lengths, in tokens, for which the report on a model says how many sequences fit, beside
the longest context that the model was made for."""


@dataclass(frozen=True, slots=True)
class Fit:
    """At most ``rows`` sequences of ``context`` tokens (prompt and answer together) may run at
    once."""

    context: int
    rows: int


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A model's needs and this machine's memory. Sizes are bytes: ``file_bytes`` on the disk,
    ``weight_bytes`` in memory; ``memory_bytes`` is the part of the free memory that a worker would
    use, and ``kv_budget`` the part of ``memory_bytes`` for the KV caches of running sequences. A
    sequence takes ``kv_bytes_per_row`` whatever its length, and ``kv_bytes_per_token`` more for
    each token. ``context`` is in tokens, 0 if the model has no limit. ``rows`` lists how many
    sequences fit at several lengths. ``capabilities`` are those that show without loading the
    model, as a JSON object."""

    model: str
    path: str
    architecture: str
    device: str
    context: int
    file_bytes: int
    weight_bytes: int
    memory_bytes: int
    kv_budget: int
    kv_bytes_per_token: int
    kv_bytes_per_row: int
    max_rows: int
    fits: bool
    rows: list[Fit]
    capabilities: dict[str, Any]


def diagnose(settings: WorkerSettings) -> Diagnosis:
    """Diagnoses the model that a worker with these settings would serve.

    Raises:
        ModelLoadError: the model cannot be served at all.
    """
    model, tokenizer, config = assemble(settings)
    new_cache = cache_factory(model, config, settings)
    with run_errors(settings):
        cost = kv_cost(model, new_cache)
    can = capabilities_of(tokenizer, config, settings, new_cache())
    weight_bytes = _weight_bytes(model)
    limit = memory.limit_bytes(settings)
    budget = Budget(
        max_rows=can.rows,
        kv_bytes=memory.kv_bytes(settings, limit, weight_bytes),
        bytes_per_token=cost.per_token,
        bytes_per_row=cost.per_row,
    )
    rows = fits(budget, can.context)
    return Diagnosis(
        model=settings.model_name,
        path=settings.model_path,
        architecture=str(config.get("model_type", "")),
        device=str(mx.device_info().get("device_name", mx.default_device())),
        context=can.context,
        file_bytes=sum(file.stat().st_size for file in weight_files(Path(settings.model_path))),
        weight_bytes=weight_bytes,
        memory_bytes=limit,
        kv_budget=max(0, budget.kv_bytes),
        kv_bytes_per_token=cost.per_token,
        kv_bytes_per_row=cost.per_row,
        max_rows=budget.max_rows,
        fits=rows[0].rows > 0,
        rows=rows,
        capabilities=shown(can),
    )


def fits(budget: Budget, context: int) -> list[Fit]:
    """Returns how many sequences fit into the budget at each standard context length (``CONTEXTS``:
    2048, 8192 and 32768 tokens) below ``context``, and at ``context`` itself, the longest that the
    model was made for (0 if it has no limit). The list is never empty."""
    lengths = [length for length in CONTEXTS if not context or length < context]
    if context:
        lengths.append(context)
    return [Fit(length, budget.rows_at(length)) for length in lengths]


def _weight_bytes(model: Any) -> int:
    arrays: list[mx.array] = [array for _, array in tree_flatten(model.parameters())]  # type: ignore[misc, str-unpack]
    return sum(array.nbytes for array in arrays)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m mayfly_worker.doctor")
    parser.add_argument("model", nargs="?", default="", metavar="MODEL")
    parser.add_argument("--cache", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--options", type=json.loads, default={}, help="fields of WorkerSettings, as JSON"
    )
    arguments = parser.parse_args()
    with claim_stdout() as out:
        try:
            found = find(arguments.model, arguments.cache)
            settings = WorkerSettings(
                slot="doctor",
                incarnation=0,
                control="",
                listen="",
                model_path=str(found.path),
                model_name=found.name,
                **arguments.options,
            )
            json.dump(asdict(diagnose(settings)), out)
        except (FetchError, ModelLoadError) as error:
            json.dump({"error": str(error)}, out)
            return Exit.CONFIGURATION
    return Exit.BYE


if __name__ == "__main__":
    sys.exit(main())
