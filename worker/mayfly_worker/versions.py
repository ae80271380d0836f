"""What a worker is made of."""

from __future__ import annotations

import contextlib
from importlib.metadata import PackageNotFoundError, version

DISTRIBUTIONS = ("mlx-mayfly", "mlx", "mlx-lm")


def versions() -> dict[str, str]:
    """By distribution; one that runs from a source tree has no version, and is left out."""
    found = {}
    for name in DISTRIBUTIONS:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
