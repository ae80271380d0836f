"""Random keys that depend on a token's place in its own answer and on nothing else.

The noise of a token is keyed by (seed, choice, position): the same request draws the same tokens
alone, in any batch, and when another worker goes on with it after a fault. The 64-bit keys are the
outputs of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014), a generator whose n-th output can be had directly.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_STEP = 0x9E3779B97F4A7C15
_GOLDEN = np.uint64(_STEP)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1


def _finalize(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


def stream_of(seed: int, choice: int) -> int:
    """The 64-bit state that a choice's keys are counted from."""
    start = (seed + choice * _STEP) & _MASK
    return int(_finalize(np.array([start], dtype=np.uint64))[0])


def keys_at(streams: NDArray[np.uint64], positions: Sequence[int]) -> NDArray[np.uint32]:
    """One MLX random key a row, shape [rows, 2]: output number ``position`` of each stream."""
    counters = np.asarray(positions, dtype=np.uint64) + np.uint64(1)
    return _finalize(streams + counters * _GOLDEN).view(np.uint32).reshape(-1, 2)
