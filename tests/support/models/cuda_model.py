"""The code of a Llama that really fails on a GPU; lies in the model's folder as its ``model_file``.

The code imports only packages that a worker has, since it runs in a worker. Faults and their
triggers are read from ``faults.json`` in the model's folder, which :mod:`support.models.cuda`
writes. The faults are lazy, like those of any kernel: a fault becomes a part of the logits' graph
and is raised wherever the engine next evaluates an array.
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
    """A fault that happens once, in whichever process that loads the model is first: ``after``
    decode steps since a prompt that contains the ``trigger`` (token ids), or with 0 in the prefill
    of the prompt."""

    name: str
    trigger: list[int]
    after: int

    def claim(self) -> bool:
        """Returns True the first time, over all processes. The claim is a file, because the fault
        may kill the process."""
        try:
            (FOLDER / f"{self.name}.struck").open("x").close()
        except FileExistsError:
            return False
        return True


def run_kernel(name: str, source: str, logits: mx.array) -> mx.array:
    """Returns the logits unchanged, but made to depend on a one-thread CUDA kernel with the given
    source, so that the kernel runs when the logits are evaluated."""
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
    """Makes the GPU store to an illegal address when the logits are evaluated."""
    source = "out[0] = inp[0]; *(volatile float*)0x10 = inp[0];"
    return run_kernel("stray_store", source, logits)


def spin(logits: mx.array) -> mx.array:
    """Makes a kernel spin for at least 60 s (at a GPU clock of up to 2 GHz) when the logits are
    evaluated. The compiler cannot remove the loop, since it cannot foresee the end."""
    source = (
        "long long begin = clock64();"
        "while (clock64() - begin < 120000000000LL) { __nanosleep(1000); }"
        "out[0] = inp[0];"
    )
    return run_kernel("spin", source, logits)


def out_of_memory(logits: mx.array) -> mx.array:
    """Makes MLX allocate 1 TB, more than any GPU has, when the logits are evaluated."""
    return logits + mx.ones((1024, 1 << 30), dtype=mx.uint8)[:1, :1].astype(logits.dtype)


def kill(logits: mx.array) -> mx.array:
    """Kills the process (SIGKILL) while the forward pass runs on the GPU."""
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
        """The model's forward pass: token ids [B, L] to logits [B, L, V]. Adds the fault, if one is
        due."""
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
