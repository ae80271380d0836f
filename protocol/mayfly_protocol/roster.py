"""What a reaper publishes about its node, and what it is asked.

A roster is always the full picture: a subscriber that came late or missed some is right again
with the next one, at most a second later.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from mayfly_protocol.counters import PublishedCounters
from mayfly_protocol.lifecycle import ModelCard

ROSTER_INTERVAL_S = 1.0
ROSTER_TOPIC = b"roster"

SlotState = Literal[
    "spawning", "loading", "canary", "ready", "draining", "backoff", "failed", "gone"
]


@dataclass(slots=True)
class SlotView(PublishedCounters):
    """One slot as it is now. ``detail`` is for people: why it failed, what it waits for.

    ``load_done`` and ``load_total`` are bytes while it loads; ``retry_in_s`` is when a slot in
    back-off will be tried again, ``age_s`` how long this incarnation has lived. ``trial`` is set
    for a worker whose predecessors failed one after the other, until it has held for a while: it
    is given one request at a time.

    While a worn worker is replaced, its slot has two views with different incarnations: one that
    serves beside one that loads, or one that serves beside one that drains.
    """

    slot: str
    model: str
    state: SlotState
    incarnation: int
    pid: int = 0
    endpoint: str = ""
    public_key: str = ""
    card: ModelCard | None = None
    phase: str = ""
    load_done: int = 0
    load_total: int = 0
    progress: int = 0
    age_s: float = 0.0
    retry_in_s: float | None = None
    detail: str = ""
    trial: bool = False


@dataclass(frozen=True, slots=True)
class Loss:
    """A worker that was lost within the last minute: one that ended without being asked to, or is
    being ended. ``suspects`` are requests that may have done it; ``marked`` were in its last
    forward pass too, but had been for long."""

    slot: str
    incarnation: int
    kind: str
    scope: str
    first_cause: str
    age_s: float
    suspects: tuple[str, ...] = ()
    marked: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Autopsy:
    """What is on record of a worker that was lost, in short: written when its process is gone, some
    moments after the ``Loss``. ``phase``, ``inferences`` and ``running`` are by its last beat;
    ``done`` says for people what followed."""

    id: str
    slot: str
    model: str
    incarnation: int
    pid: int
    kind: str
    scope: str
    first_cause: str
    phase: str
    inferences: int
    running: int
    lived_s: float
    done: str
    age_s: float


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A request that workers die of, known by a hash of all that decides what it computes
    (``fingerprint``), and refused everywhere for another ``left_s`` seconds. ``kind`` is what they
    died of."""

    fingerprint: str
    kind: str
    left_s: float


@dataclass(frozen=True, slots=True)
class Roster:
    """A node. ``epoch`` changes when its reaper is a new process, ``revision`` with every change;
    incarnations are unique within an epoch. ``autopsies`` are the last ones, the oldest first,
    those of reapers before this one included. ``refused`` counts, by
    reason, what peers were refused at any of its sockets; it only grows within an epoch.
    ``minor`` is the minor version of the protocol that its reaper speaks."""

    node: str
    epoch: str
    revision: int
    pid: int
    slots: tuple[SlotView, ...]
    losses: tuple[Loss, ...] = ()
    quarantined: tuple[Quarantined, ...] = ()
    autopsies: tuple[Autopsy, ...] = ()
    refused: dict[str, int] = field(default_factory=dict)
    minor: int = 0


@dataclass(frozen=True, slots=True)
class Recycle:
    """Replace a slot's worker in good order (all of them where ``slot`` is empty)."""

    slot: str = ""


@dataclass(frozen=True, slots=True)
class DrainNode:
    """Take no new requests, let what runs go on for at most ``grace_s`` seconds, then end the
    whole node."""

    grace_s: float


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Have every front end refuse a request for ``ttl_s`` seconds."""

    fingerprint: str
    kind: str
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Release:
    """Refuse no longer what begins with ``fingerprint``: everything where that is empty."""

    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class Ask:
    """Asks for a ``Roster`` now."""


@dataclass(frozen=True, slots=True)
class AskMetrics:
    """Asks for the node's metrics now."""


@dataclass(frozen=True, slots=True)
class MetricsText:
    """They, in Prometheus's text format."""

    text: str


@dataclass(frozen=True, slots=True)
class Done:
    """The answer to a command: what was done, for people."""

    ok: bool
    message: str = ""


ToNode = Recycle | DrainNode | Quarantine | Release | Ask | AskMetrics
FromNode = Done | Roster | MetricsText
