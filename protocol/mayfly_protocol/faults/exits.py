"""Kinds of fault for the end of a worker's process, and for processes that hang without ending.

The exit status, or the reaper's timeouts, tell these kinds apart. The signatures (regular
expressions) are for people who have nothing but a log: an exit whose status is known is never
classified by its signature.
"""

from __future__ import annotations

import re

from mayfly_protocol.faults.kinds import Kind

ENDS = (
    Kind(
        "killed_by_system",
        "machine",
        "The operating system killed the process to get its memory back: the OOM killer on Linux, "
        "jetsam on macOS.",
        "The next worker is started after a pause, with a smaller memory budget. The requests of "
        "its last forward pass become suspects.",
        "Give the machine less to hold: fewer workers, fewer rows (--max-rows), a smaller model; "
        "in a container, raise its memory limit.",
        re.compile(
            r"Out of memory: Killed process|oom-kill:constraint=|Memory cgroup out of memory"
            r"|memorystatus: killing"
        ),
    ),
    Kind(
        "killed",
        "worker",
        "Somebody outside Mayfly killed the process with a signal.",
        "It is replaced at once; its requests continue elsewhere, none is suspected, and it is not "
        "counted against the slot.",
        "Nothing, if it was you: `mayfly recycle` does it without a loss. Otherwise look for a "
        "supervisor or a script that ends processes.",
        blame="none",
    ),
    Kind(
        "crashed",
        "worker",
        "The process was ended by SIGSEGV, SIGBUS, SIGILL or SIGTRAP: native code did something "
        "impossible. On a CPU, a token id beyond the vocabulary and an array too large to "
        "allocate both do.",
        "It is replaced; its requests continue elsewhere and those in flight become suspects.",
        "Look at the stacks in the autopsy; report it to MLX with the prompt that does it.",
        re.compile(r"Fatal Python error: (?:Segmentation fault|Bus error|Illegal instruction)"),
    ),
    Kind(
        "aborted",
        "worker",
        "The process ended itself with SIGABRT, and nothing that it wrote says why.",
        "It is replaced; its requests continue elsewhere.",
        "Look at the stacks in the autopsy.",
        re.compile(r"Fatal Python error: Aborted"),
    ),
    Kind(
        "wedged",
        "worker",
        "The worker's heart beat, but its work stood still for longer than its phase may take: an "
        "evaluation that never returns, on a fence or a dead driver.",
        "Its requests are moved elsewhere at once; it is asked to leave, made to write its stacks, "
        "then killed and replaced.",
        "The stacks in the autopsy show where it stood. A model that is merely slow needs a larger "
        "budget for the phase.",
        re.compile(r"Timeout \(\d+:\d\d:\d\d(?:\.\d+)?\)!"),
    ),
    Kind(
        "silent",
        "worker",
        "No heartbeat came from the worker: native code keeps Python's lock, or the process is "
        "stopped.",
        "Its requests are moved elsewhere at once; it is killed and replaced.",
        "Look whether something stopped the process (SIGSTOP, a debugger) or the machine swaps.",
    ),
    Kind(
        "unknown",
        "worker",
        "The engine raised, or the process ended with, something that has no row of its own here.",
        "The worker leaves and is replaced: an engine that raised something unnamed is not "
        "trusted.",
        "Read the first exception in the autopsy, and report it if it comes from Mayfly.",
    ),
)

LEAVINGS = (
    Kind(
        "left",
        "worker",
        "The worker ended with status 0 although nobody had asked it to.",
        "It is replaced.",
        "Report it: a worker leaves only when told to.",
        blame="none",
    ),
    Kind(
        "recycled",
        "recycle",
        "The worker had done its share of work, handed over what still ran, and left.",
        "Its successor takes the slot; no request is lost.",
        "Nothing: this is routine.",
        blame="none",
    ),
    Kind(
        "configuration",
        "model",
        "The worker can't serve with the settings it was given.",
        "The slot fails and says why, until it is configured otherwise.",
        "The first cause in the autopsy names the setting.",
        blame="none",
    ),
    Kind(
        "load_failed",
        "worker",
        "The model did not load, for a reason that may pass.",
        "The slot tries again after a pause that grows.",
        "The first cause in the autopsy says what was missing.",
        blame="none",
    ),
    Kind(
        "orphaned",
        "worker",
        "The worker lost the reaper that had started it, finished what it could, and left.",
        "A new reaper fills the slot.",
        "Look why the reaper ended.",
        blame="none",
    ),
    Kind(
        "not_started",
        "machine",
        "The operating system would not start a worker's process.",
        "The slot tries again after a pause that grows.",
        "Look at the limits on processes, memory and open files.",
        blame="none",
    ),
)
"""Ends of a worker's process that are no faults of the engine; each is recognised by an exit code
of the worker, or by an error of the operating system."""
