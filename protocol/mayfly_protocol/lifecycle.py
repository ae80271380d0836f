"""Messages between one incarnation of a worker and the reaper that spawned it.

::

    worker                                     reaper
    Hello -------------------------------------->
    Loading(phase, done, total) ... ------------>
    Ready(endpoint, card) ---------------------->
    Beat ... ----------------------------------->
                         <----------------------- Drain(grace_s)
    Fault -------------------------------------->   then the process exits
    Bye(code) ---------------------------------->   likewise

The exit codes of a worker are part of the conversation: see :class:`Exit`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

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
    """The first message of an incarnation, and the only one with slot and incarnation in it: the
    connection's routing id names both for every message."""

    slot: str
    incarnation: int
    pid: int
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Loading:
    """Progress of a load: ``done`` of ``total`` bytes (0 of 0 where a phase has no measure)."""

    phase: LoadPhase
    done: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True)
class ModelCard:
    """Properties of a loaded model that front ends need.

    ``digest`` is equal exactly if weights, tokenizer, template, adapter and KV precision are
    equal: a continuation goes only to a worker with the same digest. ``rows`` is the number of
    sequences that the worker decodes together at most.
    """

    digest: str
    architecture: str = ""
    context: int = 0
    vocabulary: int = 0
    kv_bytes_per_token: int = 0
    weight_bytes: int = 0
    chat: bool = True
    tools: bool = False
    reasoning: bool = False
    rows: int = 0


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded, and the worker listens at ``endpoint``: an ``ipc`` path, or
    ``tcp://*:PORT``, whose host is the one at which a peer reaches the node. ``public_key`` is the
    incarnation's CURVE key in hex, empty if it has none."""

    endpoint: str
    card: ModelCard
    public_key: str = ""


@dataclass(slots=True)
class Beat(WorkerCounters):
    """A heartbeat with proof of work in it, and with all counters of the worker.

    ``progress`` counts the engine's steps and only grows: a busy worker whose number stands still
    is wedged, however regular its beats are.
    """

    phase: WorkPhase
    progress: int


@dataclass(frozen=True, slots=True)
class Cause:
    """An exception: ``text`` is its message, ``traceback`` all of it as Python formats it."""

    type: str
    text: str
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of the engine. ``first`` is its cause; exceptions that came ``later`` followed from
    it. ``requests`` are those in flight, ``suspects`` those in the forward pass that failed."""

    kind: str
    scope: Scope
    first: Cause
    later: tuple[Cause, ...] = ()
    requests: tuple[str, ...] = ()
    suspects: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Bye:
    """The process is about to exit with ``code``; ``reason`` is for people."""

    code: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Drain:
    """Order to admit no more requests, to hand over those that still run after ``grace_s`` seconds,
    and to exit."""

    grace_s: float


ToReaper = Hello | Loading | Ready | Beat | Fault | Bye
ToSlot = Drain
