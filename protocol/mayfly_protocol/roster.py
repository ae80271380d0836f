"""Messages that a reaper publishes about its node, and commands that it takes.

A roster always holds the whole node: a subscriber that came late, or missed some, is up to date
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
    """A slot with one of its workers. ``detail`` is for people: the reason of a failure, or of the
    wait.

    ``load_done`` and ``load_total`` are bytes while the model loads; ``retry_in_s`` is the time
    until a slot in back-off is tried again, ``age_s`` the age of this incarnation. ``trial`` is set
    for a worker whose predecessors failed one after the other, until it has worked for a while: it
    is given one request at a time.

    While a worker is recycled, its slot has two views with different incarnations: one that serves
    beside one that loads, or one that serves beside one that drains.
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
    """A worker lost within the last minute: it ended without being asked to, or is being ended.
    ``suspects`` are requests that may have caused it; ``marked`` ones were in its last forward pass
    without being new there."""

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
    """Summary of the record of a lost worker, written when its process is gone, some moments after
    the ``Loss``. ``phase``, ``inferences`` and ``running`` are from its last beat; ``done`` tells
    people what the reaper did about it."""

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
    """A request that ends workers, refused by every front end for another ``left_s`` seconds.
    ``fingerprint`` is a hash of everything that decides its computation; ``kind`` is the kind of
    the workers' faults."""

    fingerprint: str
    kind: str
    left_s: float


@dataclass(frozen=True, slots=True)
class Roster:
    """A node with all its slots.

    ``epoch`` changes with every new process of the reaper, ``revision`` with every change;
    incarnations are unique within an epoch. ``autopsies`` are the latest, the oldest first, those
    of earlier reapers included. ``refused`` counts the peers refused at any of the node's sockets,
    by reason; it only grows within an epoch. ``minor`` is the reaper's minor version of the
    protocol.
    """

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
    """Command to replace a slot's worker in good order; every slot's if ``slot`` is empty."""

    slot: str = ""


@dataclass(frozen=True, slots=True)
class DrainNode:
    """Command to take no new requests, to let running ones go on for at most ``grace_s`` seconds,
    and then to end the whole node."""

    grace_s: float


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Command to have every front end refuse a request for ``ttl_s`` seconds."""

    fingerprint: str
    kind: str
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Release:
    """Command to end the quarantine of all fingerprints that begin with ``fingerprint``; of all if
    it is empty."""

    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class Ask:
    """Request for a ``Roster`` now."""


@dataclass(frozen=True, slots=True)
class AskMetrics:
    """Request for the node's metrics now."""


@dataclass(frozen=True, slots=True)
class MetricsText:
    """The node's metrics in Prometheus's text format."""

    text: str


@dataclass(frozen=True, slots=True)
class Done:
    """Answer to a command; ``message`` tells people what was done."""

    ok: bool
    message: str = ""


ToNode = Recycle | DrainNode | Quarantine | Release | Ask | AskMetrics
FromNode = Done | Roster | MetricsText
