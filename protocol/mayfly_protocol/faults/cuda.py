"""Faults of CUDA.

MLX's messages all have one form: ``<the call as in its source> failed: <CUDA's message>``. The call
can be long: signatures (the regular expressions of the fault table) match at most 300 characters of
it, so that a search stays linear in the text's length, and end at the first ``failed``, since a
line may hold several such errors.
"""

from __future__ import annotations

import re

from mayfly_protocol.faults.kinds import Kind

_FAILED = r"\((?>.{0,300}?failed)"
"""Regular expression for the arguments of the CUDA call in an error text, up to the first
``failed``. The group is atomic, so that it never tries a later ``failed``."""

CUDA = (
    Kind(
        "cuda_sticky",
        "worker",
        "A GPU kernel did something after which CUDA refuses this process for good: every later "
        "call, in every thread, fails with the same words.",
        "The process ends without touching CUDA again and is replaced; its requests continue "
        "elsewhere. The requests of that forward pass become suspects.",
        "Once is bad luck or failing hardware (nvidia-smi shows ECC and Xid errors); the same "
        "prompt each time is a bug of a kernel: report it to MLX.",
        re.compile(
            r" failed: (?:an illegal memory access was encountered"
            r"|the launch timed out and was terminated"
            r"|an illegal instruction was encountered"
            r"|misaligned address"
            r"|invalid program counter"
            r"|unspecified launch failure"
            r"|hardware stack error"
            r"|device-side assert triggered"
            r"|operation not supported on global/shared address space"
            r"|tensor memory not completely freed"
            r"|Invalid access of peer GPU memory over nvlink or a hardware error"
            r"|the MPS client has been terminated by the server"
            r"|uncorrectable ECC error encountered)"
        ),
    ),
    Kind(
        "cuda_out_of_memory",
        "batch",
        "The GPU has no memory left for an array. The process survives it: a smaller operation "
        "works right afterwards.",
        "The batch is thrown away, its memory freed, and its requests are retried. A second time "
        "within a minute costs the worker.",
        "Look at nvidia-smi for other processes on this GPU; serve fewer workers, fewer rows "
        "(--max-rows) or a smaller model.",
        re.compile(rf"cu\w{{1,60}}{_FAILED}: out of memory"),
    ),
    Kind(
        "cuda_graph_thrash",
        "worker",
        "MLX has built more CUDA graphs than its cache holds, and reports this advice about speed "
        "as an error. From then on each new shape raises it again.",
        "The worker leaves and is replaced. Workers run with MLX_ENABLE_CACHE_THRASHING_CHECK=0, "
        "so this comes only where that was overridden.",
        "Leave the check off, or raise the variable that the message names. MLX before 0.32.2 "
        "counts misses over the whole life of a process: update.",
        re.compile(
            r"Cache thrashing is happening, please set the environment variable \w+ "
            r"to a larger value than \d+"
        ),
        blame="none",
    ),
    Kind(
        "cuda_graph_poison",
        "worker",
        "MLX went on with a CUDA graph that an earlier failure had left half built.",
        "The worker leaves and is replaced; its requests continue elsewhere.",
        "This is a mask: the failure that matters came before it. Look further up.",
        re.compile(rf"cudaGraphAddDependencies{_FAILED}: invalid argument"),
        blame="none",
        follows=True,
    ),
    Kind(
        "cuda_capture",
        "worker",
        "The recording of a CUDA graph failed. MLX ends it in a destructor, where an exception "
        "aborts the process.",
        "The process is gone (SIGABRT) or leaves, and is replaced.",
        "Look further up for the failure that interrupted the recording. If there is none, set "
        "MLX_USE_CUDA_GRAPHS=0 for the workers.",
        re.compile(rf"cudaStream(?:Begin|End)Capture{_FAILED}"),
        follows=True,
    ),
    Kind(
        "cuda_graph_launch",
        "worker",
        "A kernel could not be added to a CUDA graph, or the graph not be launched. It depends on "
        "the shapes: sizes beyond 2^31 elements are known to do it.",
        "The worker leaves and is replaced. The requests of that forward pass become suspects; "
        "after two graph faults in a row the successor runs without graphs.",
        "Shorten the prompt, or set MLX_USE_CUDA_GRAPHS=0 for the workers.",
        re.compile(
            r"c(?:uda|u)(?:GraphAddKernelNode|GraphKernelNode\w{1,60}|LaunchKernelExC?"
            rf"|GraphInstantiate|GraphLaunch|GraphExecUpdate){_FAILED}"
        ),
    ),
    Kind(
        "cuda_library",
        "worker",
        "A call of cuBLAS, cuDNN, cuFFT or cuSOLVER failed, or cuBLAS knows no algorithm for a "
        "product of these shapes.",
        "The worker leaves and is replaced; its requests continue elsewhere.",
        "Check that the CUDA libraries are those that this build of MLX was made for.",
        re.compile(
            rf"c(?:ublas|udnn|ufft|usolver)\w{{1,60}}{_FAILED}"
            r"|Can not find algorithm for matmul"
        ),
    ),
    Kind(
        "cuda_compile",
        "model",
        "A CUDA kernel did not compile or its compiled form did not load. A process that was "
        "killed while it wrote MLX's PTX cache leaves a broken entry behind.",
        "The slot's PTX cache is wiped and the worker started once more; then the slot fails.",
        "Where CUDA headers are not found, install the CUDA toolkit or set CUDA_HOME. Otherwise "
        "compare the versions of driver, toolkit and MLX.",
        re.compile(
            r"Failed to compile kernel: "
            r"|Failed to load compiled .{1,200}? kernel: "
            r"|There is no kernel named "
            rf"|nvrtc\w{{1,60}}{_FAILED}"
            r"|Can not find locations of CUDA headers"
        ),
        blame="none",
    ),
    Kind(
        "cuda_environment",
        "machine",
        "The GPU can't be used here and now: there is none, the driver is too old for this build, "
        "another process has it for itself, or it is too old a model.",
        "The next worker is started after a pause that grows.",
        "Run nvidia-smi; update the driver, free the GPU, or install the extra for its CUDA "
        "version (cuda12, cuda13).",
        re.compile(
            r"no CUDA-capable device is detected"
            r"|CUDA driver version is insufficient"
            r"|(?:CUDA-capable device\(s\) )?is/are busy or unavailable"
            r"|no kernel image is available"
        ),
        blame="none",
    ),
    Kind(
        "cuda_event",
        "worker",
        "MLX waited for an event that nothing had recorded, or on the wrong kind of stream. Arrays "
        "have crossed from one stream to another without an evaluation.",
        "The worker leaves and is replaced; its requests continue elsewhere.",
        "Report it, with the traceback.",
        re.compile(
            r"Should not wait on a CudaEvent before recording|CudaEvent can not wait on CPU stream"
        ),
        blame="none",
    ),
    Kind(
        "cuda_other",
        "worker",
        "A CUDA call failed for a reason that has no row of its own here.",
        "The worker leaves and is replaced; its requests continue elsewhere.",
        "The words behind `failed:` are CUDA's own and documented with its error codes.",
        re.compile(rf"\bcu(?:da)?[A-Z]\w{{1,60}}{_FAILED}: "),
    ),
)
