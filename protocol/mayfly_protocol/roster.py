"""Messages that a reaper, the supervisor of a node's workers, publishes about the node, and
commands that it takes.

A roster (:class:`Roster`) always describes the whole node: a subscriber that came late, or missed
some rosters, is up to date with the next roster, at most a second later.
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
    """State of a slot (a node's place for one worker process at a time) and of the worker in it.
    ``detail`` tells people why the slot failed or waits.

    ``load_done`` and ``load_total`` are bytes while the model loads; ``retry_in_s`` is the time
    until a slot that waits after a loss gets a worker, ``age_s`` the age of this worker process
    (``incarnation``). ``trial`` is True for a worker whose predecessors failed one after the other,
    until it has worked for a while: front ends give it only what no other worker can take.

    While a healthy worker is replaced, its slot has two views with different incarnations: a worker
    that serves beside a worker that loads or drains.
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
    """Notice of a worker lost within the last minute: its process ended without being asked to, or
    is being ended. ``suspects`` are requests that may have caused the loss; ``marked`` requests
    were in the worker's last forward pass, too, but had run well for a while."""

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
    """Summary of the crash record of a lost worker, published when its process is gone, some
    moments after the ``Loss``. ``phase``, ``inferences`` and ``running`` are from the worker's last
    heartbeat; ``done`` tells people what the reaper did about the loss."""

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
    ``fingerprint`` is a hash of everything that decides the request's computation; ``kind`` names
    the kind of fault that it caused in workers."""

    fingerprint: str
    kind: str
    left_s: float


@dataclass(frozen=True, slots=True)
class Roster:
    """State of a node with all its slots (places for one worker each), as the node's reaper
    publishes it to front ends at least once a second.

    ``epoch`` changes with every new process of the reaper, ``revision`` with every change of the
    node; the workers' process numbers (``incarnation``) are unique within an epoch. ``autopsies``
    are the latest crash records of workers, the oldest first, including records of earlier reapers.
    ``refused`` counts the peers refused at any of the node's sockets, by reason; it only grows
    within an epoch. ``minor`` is the reaper's minor version of the protocol.
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
    """Command to replace the worker of a slot without losing requests; an empty ``slot`` stands for
    all slots of the node."""

    slot: str = ""


@dataclass(frozen=True, slots=True)
class DrainNode:
    """Command to take no new requests, to let running ones go on for at most ``grace_s`` seconds,
    and then to end the whole node."""

    grace_s: float


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Command to have every front end refuse a request for ``ttl_s`` seconds, since it ends
    workers; ``fingerprint`` is a hash of everything that decides the request's computation."""

    fingerprint: str
    kind: str
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Release:
    """Command to end the quarantine (refusal by all front ends) of requests whose fingerprints
    begin with ``fingerprint``; an empty text stands for all requests."""

    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class Ask:
    """Question for the node's present ``Roster``."""


@dataclass(frozen=True, slots=True)
class AskMetrics:
    """Question for the node's Prometheus metrics, answered by ``MetricsText``."""


@dataclass(frozen=True, slots=True)
class MetricsText:
    """The node's metrics in Prometheus's text format."""

    text: str


@dataclass(frozen=True, slots=True)
class Done:
    """Answer to a command; ``ok`` is False if the node refused it, ``message`` tells people what
    was done."""

    ok: bool
    message: str = ""


ToNode = Recycle | DrainNode | Quarantine | Release | Ask | AskMetrics
FromNode = Done | Roster | MetricsText
