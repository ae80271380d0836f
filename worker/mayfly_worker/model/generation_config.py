"""Sampling parameters that a model's authors recommend, from its ``generation_config.json``.

They hold where a request names no value of its own. ``do_sample: false`` means greedy sampling:
temperature 0. Penalties apply to the output only, as everywhere in this server.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mayfly_protocol.requests import Sampling
from mayfly_worker.model.json_files import json_object
from mayfly_worker.model.weight_files import ModelLoadError

FILE = "generation_config.json"
RANGES = {
    "temperature": (0.0, math.inf),
    "top_p": (0.0, 1.0),
    "top_k": (-1.0, 2.0**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 10.0),
}
"""Names of the sampling parameters that are read, with their least and greatest values."""

MIN_TEMPERATURE = 1e-3
"""Lowest temperature that samples; logits that are divided by a lower one overflow, and every draw
would be the likeliest token anyway."""


def recommended(folder: Path) -> dict[str, float]:
    """Returns the sampling parameters that the model's folder recommends, by their names in
    ``RANGES``; none if it has no ``generation_config.json``.

    Raises:
        ModelLoadError: the file holds no JSON object, or a value that is out of range.
    """
    path = folder / FILE
    if not path.exists():
        return {}
    config = json_object(path)
    found = {name: config[name] for name in RANGES if config.get(name) is not None}
    for name, value in found.items():
        least, greatest = RANGES[name]
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not least <= value <= greatest or math.isinf(value):
            raise ModelLoadError(f"{folder.name}: {name} in {FILE} cannot be {value!r}")
    if config.get("do_sample") is False or found.get("top_p") == 0:
        found["temperature"] = 0.0
    if found.get("temperature", 1.0) < MIN_TEMPERATURE:
        found = {k: v for k, v in found.items() if k == "repetition_penalty"} | {"temperature": 0.0}
    if "top_k" in found:
        found["top_k"] = max(0, int(found["top_k"]))
    return found


def completed(sampling: Sampling, recommended: Mapping[str, float]) -> Sampling:
    """Returns a request's sampling parameters, with the recommended values for those parameters
    that the request does not name."""
    values: dict[str, Any] = {
        name: int(value) if name == "top_k" else float(value)
        for name, value in recommended.items()
        if name in sampling.unnamed
    }
    return replace(sampling, **values) if values else sampling
