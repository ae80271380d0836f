"""Faults that any build of MLX can have: in loading, shapes, threads, and in its numbers.

For faults that Mayfly itself detects (logits that are not finite, wrong tokens for a test prompt),
the signature (a regular expression) matches Mayfly's own message.
"""

from __future__ import annotations

import re

from mayfly_protocol.faults.kinds import Kind

STREAM_THREAD = Kind(
    "stream_thread",
    "worker",
    "An array was evaluated in another thread than its stream's. MLX's streams belong to one "
    "thread each since 0.31.2.",
    "The worker leaves and is replaced; its requests continue elsewhere.",
    "It is a bug of Mayfly's, or of code that comes with a model: report it, with the traceback.",
    re.compile(r"There is no Stream\((?:gpu|cpu), -?\d+\) in current thread"),
    blame="none",
)

CXX_ABORT = Kind(
    "cxx_abort",
    "worker",
    "A C++ exception found no handler and ended the process, as happens when MLX throws in a "
    "destructor or in a completion handler. Its own text names nothing that is known.",
    "The process is gone (SIGABRT) and is replaced; its requests continue elsewhere.",
    "The exception's text follows on the same line (macOS) or after `what():` (Linux): search "
    "for that.",
    re.compile(r"libc\+\+abi: terminating|terminate called"),
)

ENGINE = (
    CXX_ABORT,
    Kind(
        "unsupported",
        "model",
        "MLX has no kernel for something that this model does: an operation, a type, or a shape "
        "on this device.",
        "The slot fails and says why; another worker would meet the same.",
        "Try another quantization of the model, a newer MLX, or another device.",
        re.compile(
            r"has no (?:GPU|CUDA) implementation"
            r"|No implementation for problem shape"
            r"|Unsupported dtype"
        ),
        blame="none",
    ),
    Kind(
        "shape",
        "batch",
        "Arrays whose shapes do not go together met in the model: its code, its configuration or "
        "a KV cache is not what the other expected.",
        "The batch is thrown away and rebuilt, and its requests are retried; one that does it "
        "again alone is quarantined.",
        "If every request does it, the model's files do not fit its code: update mlx-lm or fetch "
        "the model again.",
        re.compile(
            r"(?<!\w)\[(?:broadcast_shapes|concatenate|take|gather|matmul|full)\] "
            r"|Cannot broadcast array of shape"
        ),
    ),
    Kind(
        "model_load",
        "model",
        "The model's files could not be read: missing, cut short, or not what their name says.",
        "The slot fails and says why, rather than trying for ever.",
        "Fetch the model again and check that the disk is not full.",
        re.compile(
            r"\[load_safetensors\]|\[load_gguf\]|\[read\] Unable to read|Failed to open file"
        ),
        blame="none",
    ),
    Kind(
        "nonfinite_logits",
        "worker",
        "The model's output for a row held NaN, or was the same for every token. Some GPU faults "
        "raise nothing and show only like this; text drawn from it would be garbage.",
        "The worker leaves before any token of it is sent. The row becomes a suspect.",
        "If one model does it every time, its weights are damaged or overflow in their precision: "
        "fetch it again or try another quantization.",
        re.compile(r"logits of \d+ row\(s\) are not finite"),
    ),
    Kind(
        "canary_mismatch",
        "worker",
        "A fixed prompt, run to test the worker, gave other tokens than it did before with the "
        "same model, version and device, or logits that mean nothing: the device computes wrongly.",
        "The worker takes no requests; it leaves and is replaced.",
        "If every worker does it, look at the hardware. After a change that Mayfly can't see, "
        "remove the stored reference from the state directory.",
        re.compile(r"\bcanary mismatch\b"),
        blame="none",
    ),
)
