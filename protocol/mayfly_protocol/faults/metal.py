"""Faults of Metal, and of the memory allocator that every build of MLX has.

A Metal command buffer fails after the call that queued it has returned. MLX throws the error out of
whichever evaluation comes next, or aborts the process if it throws in a completion handler.

The descriptions that Metal adds (``Insufficient Memory``) are matched beside its codes
(``ErrorOutOfMemory``), because texts that were pasted or wrapped often lack the codes.
:mod:`mayfly_protocol.faults.classify` does the matching.
"""

from __future__ import annotations

import re

from mayfly_protocol.faults.kinds import Kind

_PREFIX = r"\[METAL\] Command buffer execution failed: "


def _command_buffer(code: str, description: str) -> re.Pattern[str]:
    # Up to the next such message: a line of a log may hold several.
    return re.compile(rf"{_PREFIX}(?:{description}|(?:(?!\[METAL\]).){{0,300}}Error{code})")


METAL = (
    Kind(
        "metal_submissions_ignored",
        "worker",
        "Metal refuses all further work of this process, because an earlier command buffer of it "
        "failed too badly. It repeats for every operation until the process ends.",
        "The worker leaves at once and is replaced; its requests continue elsewhere.",
        "This is never the first error. Look for the one before it: that is the cause.",
        _command_buffer("SubmissionsIgnored", r"Ignored \(for causing prior"),
        blame="none",
        follows=True,
    ),
    Kind(
        "metal_timeout",
        "worker",
        "The GPU watchdog of macOS ended a command buffer that ran for too long, as at a first "
        "prefill whose weights still had to come from disk, or beside another GPU-heavy program.",
        "The worker leaves and is replaced after a pause; its requests continue elsewhere. After "
        "two such faults in a row its successor runs shorter command buffers.",
        "Close other programs that use the GPU; lower MLX_MAX_OPS_PER_BUFFER or "
        "MLX_MAX_MB_PER_BUFFER for the workers if it recurs.",
        _command_buffer("Timeout", "Caused GPU Timeout Error"),
    ),
    Kind(
        "metal_hang",
        "worker",
        "The GPU stopped making progress on a command buffer and the driver reset it.",
        "The worker leaves, is killed if it can't, and is replaced; its requests continue "
        "elsewhere.",
        "If one prompt or one model does it again and again, report it to MLX with that prompt; "
        "update macOS.",
        _command_buffer("Hang", "Caused GPU Hang Error"),
    ),
    Kind(
        "metal_out_of_memory",
        "worker",
        "Metal could not make a command buffer's memory resident: weights, KV caches and "
        "temporaries together are more than the GPU may use at once.",
        "The worker leaves and is replaced after a pause, with less load at a time.",
        "Serve a smaller or more strongly quantized model, fewer workers, or fewer rows "
        "(--max-rows); close what else holds memory.",
        _command_buffer("OutOfMemory", "Insufficient Memory"),
    ),
    Kind(
        "metal_interactivity",
        "worker",
        "macOS ended a command buffer because the screen could not be drawn while it ran. Long "
        "prefills do it.",
        "The worker leaves and is replaced; its successor cuts prompts into smaller chunks.",
        "Lower MLX_MAX_OPS_PER_BUFFER for the workers, or run them on a Mac without a display.",
        _command_buffer("ImpactingInteractivity", "Impacting Interactivity"),
    ),
    Kind(
        "metal_memory_fault",
        "worker",
        "A GPU kernel read or wrote an address that is not its own, or a resource that is gone. "
        "It is a bug of a kernel, met with certain shapes or ids.",
        "The worker leaves and is replaced. The requests of that forward pass become suspects: "
        "one that does it again alone is quarantined.",
        "Report it to MLX with the model and the prompt's length.",
        _command_buffer("(?:PageFault|InvalidResource)", "Caused GPU Address Fault Error"),
    ),
    Kind(
        "metal_innocent_victim",
        "worker",
        "The GPU was reset because of another process's fault, and this one's command buffer was "
        "lost with it.",
        "The worker leaves and is replaced; its requests continue elsewhere and none is suspected.",
        "Look for the other program, or the other worker, that failed at the same time.",
        _command_buffer("InnocentVictim", r"Discarded \(victim of GPU"),
        blame="none",
    ),
    Kind(
        "metal_other",
        "worker",
        "A Metal command buffer failed for a reason that has no row of its own here.",
        "The worker leaves and is replaced; its requests continue elsewhere.",
        "Search for the text behind `Command buffer execution failed`.",
        re.compile(_PREFIX.rstrip()),
    ),
    Kind(
        "metal_assert",
        "worker",
        "An assertion inside Metal ended the process: two threads encoded into one command buffer, "
        "or a buffer was used after it had been committed.",
        "The process is gone (SIGABRT) and is replaced; its requests continue elsewhere.",
        "Update MLX. Code that comes with a model and uses MLX from a thread of its own does this "
        "too.",
        re.compile(
            r"failed assertion .(?:A command encoder is already encoding"
            r"|Completed handler provided after commit)"
        ),
        blame="none",
    ),
    Kind(
        "metal_resource_limit",
        "recycle",
        "The number of live GPU buffers reached Metal's limit. Such handles leak slowly with work "
        "while the memory in use stays flat.",
        "The worker hands its requests over and is recycled: a new process starts from none.",
        "If it comes before `max_inferences` does, lower `max_inferences`; update MLX and mlx-lm.",
        re.compile(r"\[metal::malloc\] Resource limit \(\d+\) exceeded"),
        blame="none",
    ),
    Kind(
        "metal_buffer_size",
        "request",
        "One array would be larger than the largest buffer this GPU can have, as attention over a "
        "very long prompt needs.",
        "That request fails with an error of the 400 class. Raised inside the batch, it costs the "
        "batch: it is rebuilt and the other requests are retried.",
        "Shorten the prompt, or serve the model with a smaller context.",
        re.compile(
            r"\[metal::malloc\] Attempting to allocate \d+ bytes which is greater than "
            r"the maximum allowed buffer size"
        ),
    ),
    Kind(
        "allocation_failed",
        "batch",
        "MLX's allocator got no memory from the system.",
        "The batch is thrown away, its memory freed, and its requests are retried. A second time "
        "within a minute costs the worker.",
        "Give the machine less to do: fewer workers, fewer rows (--max-rows), a smaller model.",
        re.compile(r"\[malloc\] Unable to allocate \d+ bytes"),
    ),
    Kind(
        "metal_objects",
        "worker",
        "Metal gave out no event or no command queue: the process has used up its share of the "
        "driver's objects, or a sandbox forbids them.",
        "The worker leaves and is replaced.",
        "In a sandbox, allow access to the GPU. Otherwise lower `max_inferences`.",
        re.compile(
            r"\[Event::Event\] Failed to create Metal shared event"
            r"|\[metal::CommandEncoder\] Failed to make new command queue"
        ),
        blame="none",
    ),
    Kind(
        "metal_init",
        "model",
        "MLX found no Metal device, or its library of kernels (mlx.metallib) is missing or from "
        "another version.",
        "The slot fails and says why; starting it again would not help.",
        "Reinstall mlx and mlx-metal in the same version. Virtual machines and remote sessions may "
        "have no GPU.",
        re.compile(
            r"\[metal::load_device\] No Metal device available"
            r"|Failed to load the (?:default )?metallib"
            r"|Can not load metallib from specified location"
            r"|\[metal::Device\] Unable to construct residency set"
        ),
        blame="none",
    ),
    Kind(
        "metal_compile",
        "model",
        "A Metal kernel did not compile or is not in the library. The same model on the same "
        "system meets it every time.",
        "The slot fails and says why.",
        "Update macOS and MLX together; a model with kernels of its own may need another version.",
        re.compile(
            r"\[metal::Device\] Unable to (?:build metal library from source"
            r"|load function|load kernel)"
        ),
        blame="none",
    ),
    Kind(
        "wired_limit",
        "model",
        "The wired memory that was asked for is more than macOS lets the GPU keep resident.",
        "The slot fails and says why.",
        "Raise the system's limit (sudo sysctl iogpu.wired_limit_mb=N) or serve a smaller model.",
        re.compile(r"\[metal::set_wired_limit\] Setting a wired limit larger than"),
        blame="none",
    ),
)
