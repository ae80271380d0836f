"""Messages between one worker process and the reaper, its supervisor, that spawned it.

::

    worker                                     reaper
    Hello -------------------------------------->
    Loading(phase, done, total) ... ------------>
    Ready(endpoint, card) ---------------------->
    Beat ... ----------------------------------->
                         <----------------------- Drain(grace_s)
    Fault -------------------------------------->   then the process exits
    Bye(code) ---------------------------------->   then the process exits

The exit codes of a worker are part of the conversation: see :class:`Exit`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

from mayfly_protocol.capabilities import Capabilities
from mayfly_protocol.counters import WorkerCounters

LoadPhase = Literal["starting", "warming", "loading", "canary"]
WorkPhase = Literal["loading", "idle", "prefill", "decode", "stopping"]
Scope = Literal["request", "batch", "recycle", "worker", "machine", "model"]


class Exit(IntEnum):
    """Exit codes of a worker that ends by itself."""

    BYE = 0
    CONFIGURATION = 3
    LOAD_FAILED = 4
    POISONED = 70
    ORPHANED = 71
    RECYCLED = 75


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of a worker process to the reaper, its supervisor. Later messages do not
    name the slot (the node's place for this worker) and the process number (``incarnation``) again,
    since the ZeroMQ routing id of the connection holds both."""

    slot: str
    incarnation: int
    pid: int
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Loading:
    """Progress of loading a model: ``done`` of ``total`` bytes, both 0 in a phase whose progress is
    not measured."""

    phase: LoadPhase
    done: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard(Capabilities):
    """Properties of a loaded model that front ends need, its capabilities among them.

    ``digest`` is equal for two workers exactly if their weights, tokenizer, chat template, adapter
    and KV precision are equal: a request that one worker has begun is continued only by a worker
    with the same digest. ``sampling`` holds the sampling parameters that a request gets if it does
    not name them.
    """

    digest: str
    architecture: str = ""
    vocabulary: int = 0
    kv_bytes_per_token: int = 0
    weight_bytes: int = 0
    sampling: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ready:
    """Message that the model is loaded and the worker listens at ``endpoint``: an ``ipc`` path, or
    ``tcp://*:PORT``, where the ``*`` stands for the host at which a peer reaches the node.
    ``public_key`` is the worker's CURVE key in hex, empty if it has none."""

    endpoint: str
    card: ModelCard
    public_key: str = ""


@dataclass(slots=True)
class Beat(WorkerCounters):
    """A heartbeat of a worker, with all its counters and a proof of its progress.

    ``progress`` counts the engine's steps and only grows: a busy worker whose ``progress`` stands
    still is hung, however regular its heartbeats are.
    """

    phase: WorkPhase
    progress: int


@dataclass(frozen=True, slots=True)
class Cause:
    """An exception that caused a fault or followed from it: ``text`` is its message, ``traceback``
    the whole traceback as Python formats it."""

    type: str
    text: str
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class Fault:
    """Report of a fault of a worker's engine. ``first`` is the exception that caused the fault,
    ``later`` are exceptions that followed from it. ``requests`` were in flight, ``suspects`` were
    in the forward pass that failed. ``kind`` names the kind of fault, ``scope`` how much is lost: a
    request, the batch, the worker and so on."""

    kind: str
    scope: Scope
    first: Cause
    later: tuple[Cause, ...] = ()
    requests: tuple[str, ...] = ()
    suspects: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Bye:
    """Message that the worker's process is about to exit with ``code``; ``reason`` is for
    people."""

    code: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Drain:
    """Order to a worker to admit no more requests, to give requests that still run after
    ``grace_s`` seconds back to their front ends, and to exit."""

    grace_s: float


ToReaper = Hello | Loading | Ready | Beat | Fault | Bye
ToSlot = Drain
