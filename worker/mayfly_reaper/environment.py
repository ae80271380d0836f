"""The environment of a worker.

MLX reads its variables when it is imported, and numbers with ``atoi``: ``true`` means 0. What the
user has set stays as it is, but for :data:`REMOVED` and the keys of clients.
"""

from __future__ import annotations

import ctypes.util
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from mayfly_protocol.secrets import SECRET_VARIABLES
from mayfly_reaper.precautions import NONE, Precautions

DEFAULTS = {
    # The check turns advice about performance into an exception out of mx.eval, after which the
    # encoder was poisoned before 0.32.2: ml-explore/mlx#4326, fixed by #4356. Read MLX again at
    # each upgrade.
    "MLX_ENABLE_CACHE_THRASHING_CHECK": "0",
    # Serving meets many shapes, and each is a graph of its own. MLX's 400 is too few; 0 throws.
    "MLX_CUDA_GRAPH_CACHE_SIZE": "2000",
}

# Fences that spin on the GPU: a process killed inside one has left the GPU locked for all others.
# MLX's own default is 0.
REMOVED = ("MLX_METAL_FAST_SYNCH",)

HOW_TO_GET_BLAS = (
    "no shared OpenBLAS was found: on this CPU MLX computes 10 to 25 times slower without it. "
    "Install one (Debian, Ubuntu: apt install libopenblas0-pthread; Fedora: dnf install "
    "openblas-threads; Arch: pacman -S openblas) and start again"
)


def worker_environment(
    inherited: Mapping[str, str],
    own: Mapping[str, str],
    ptx_folder: Path,
    blas: str | None,
    precautions: Precautions = NONE,
) -> dict[str, str]:
    """What a worker finds in its environment.

    Args:
        inherited: the reaper's environment.
        own: what the pool's configuration sets, over everything else.
        ptx_folder: for this slot alone. MLX writes compiled kernels there non-atomically: a kill
            in the middle leaves a broken entry, which must not reach other workers.
        blas: a shared BLAS to preload.
        precautions: what its predecessors died of.
    """
    left_out = (*REMOVED, *SECRET_VARIABLES)
    environment = {name: value for name, value in inherited.items() if name not in left_out}
    for name, value in (DEFAULTS | precautions.environment()).items():
        environment.setdefault(name, value)
    environment.setdefault("MLX_PTX_CACHE_DIR", str(ptx_folder))
    if blas is not None:
        others = environment.get("LD_PRELOAD", "")
        environment["LD_PRELOAD"] = f"{blas}:{others}" if others else blas
    return {**environment, **own}


def removed(inherited: Mapping[str, str]) -> list[str]:
    """The variables that a worker does not get although the user has set them."""
    return [name for name in REMOVED if name in inherited]


def wants_blas() -> bool:
    """Whether MLX is here as the wheel that computes on a Linux CPU, with a reference BLAS of its
    own. On macOS it uses Accelerate, with CUDA cuBLAS."""
    try:
        metadata.version("mlx-cpu")
    except metadata.PackageNotFoundError:
        return False
    return sys.platform == "linux"


def find_blas() -> str | None:
    """A shared OpenBLAS by the name that the dynamic linker finds it under."""
    for name in ("openblas", "openblasp"):  # the second is Fedora's, with threads
        if found := ctypes.util.find_library(name):
            return found
    return None
