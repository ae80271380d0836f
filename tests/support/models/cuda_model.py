"""The code of a Llama that really fails on a GPU. It travels in the model's folder as its
``model_file``.

It imports only packages that a worker has, since it runs there. Faults and their triggers are read
from ``faults.json`` beside it (:mod:`support.models.cuda` writes both). The faults are lazy, as
those of a kernel are: they become a part of the logits' graph, and come out of whatever the engine
evaluates next.
"""

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.models import llama

FOLDER = Path(__file__).parent
ModelArgs = llama.ModelArgs


@dataclass
class Fault:
    """A fault that happens once over the lives of all processes that load this folder, ``after`` so
    many decode steps since a prompt with the ``trigger`` (its token ids); with 0 in that prefill
    itself."""

    name: str
    trigger: list[int]
    after: int

    def claim(self) -> bool:
        """Returns True the first time. A claim is a file: it outlives the process that it kills."""
        try:
            (FOLDER / f"{self.name}.struck").open("x").close()
        except FileExistsError:
            return False
        return True


def run_kernel(name: str, source: str, logits: mx.array) -> mx.array:
    """Returns logits that depend on the output of a kernel of one thread."""
    kernel = mx.fast.cuda_kernel(
        name=name, input_names=["inp"], output_names=["out"], source=source
    )
    [out] = kernel(
        inputs=[logits.reshape(-1)[:1].astype(mx.float32)],
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.float32],
    )
    return logits + (0 * out).astype(logits.dtype)


def illegal_access(logits: mx.array) -> mx.array:
    """Stores to an address that no process has."""
    source = "out[0] = inp[0]; *(volatile float*)0x10 = inp[0];"
    return run_kernel("stray_store", source, logits)


def spin(logits: mx.array) -> mx.array:
    """Spins 60 s at a clock of at most 2 GHz, with an end that the compiler cannot foresee."""
    source = (
        "long long begin = clock64();"
        "while (clock64() - begin < 120000000000LL) { __nanosleep(1000); }"
        "out[0] = inp[0];"
    )
    return run_kernel("spin", source, logits)


def out_of_memory(logits: mx.array) -> mx.array:
    """Allocates more than any one GPU has: 1 TB."""
    return logits + mx.ones((1024, 1 << 30), dtype=mx.uint8)[:1, :1].astype(logits.dtype)


def kill(logits: mx.array) -> mx.array:
    """Sends SIGKILL with the forward pass under way on the GPU."""
    mx.async_eval(logits)
    os.kill(os.getpid(), signal.SIGKILL)
    return logits


FAULTS = {"illegal": illegal_access, "spin": spin, "memory": out_of_memory, "kill": kill}


class Model(llama.Model):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__(args)
        described = json.loads((FOLDER / "faults.json").read_text())
        self._faults = [Fault(**fault) for fault in described]
        self._due: dict[str, int] = {}

    def __call__(self, inputs: mx.array, cache: list | None = None) -> mx.array:
        """Ids [B, L] to logits [B, L, V]."""
        logits = super().__call__(inputs, cache)
        if inputs.shape[1] > 1:
            self._look_for_triggers(np.array(inputs))
        else:
            self._due = {name: steps - 1 for name, steps in self._due.items()}
        for fault in self._faults:
            if self._due.get(fault.name) == 0:
                del self._due[fault.name]
                if fault.claim():
                    logits = FAULTS[fault.name](logits)
        return logits

    def _look_for_triggers(self, ids: np.ndarray) -> None:
        for fault in self._faults:
            trigger = np.array(fault.trigger)
            if ids.shape[1] >= len(trigger):
                windows = np.lib.stride_tricks.sliding_window_view(ids, len(trigger), axis=1)
                if (windows == trigger).all(axis=-1).any():
                    self._due[fault.name] = fault.after
