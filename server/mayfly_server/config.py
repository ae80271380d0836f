"""How a front end is configured."""

from __future__ import annotations

from dataclasses import dataclass

from mayfly_protocol.roster import ROSTER_INTERVAL_S
from mayfly_protocol.serving import PEER_TIMEOUT_S


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """Times are seconds, sizes bytes."""

    nodes: tuple[str, ...]
    """Control addresses of the nodes whose workers are used."""
    queue_wait_s: float = 30.0
    """How long a request waits, unanswered, for a worker that is being loaded."""
    failover_wait_s: float = 120.0
    """How long a request that was already accepted waits for another worker."""
    accept_wait_s: float = 30.0
    """A worker that has neither accepted nor rejected a request after this is lost to it."""
    stall_s: float = 180.0
    """A worker that has nothing to say about a running request for this long is lost to it: twice
    the longest that a reaper lets one step take."""
    max_attempts: int = 5
    """Workers that a request may outlive."""
    pong_wait_s: float = PEER_TIMEOUT_S
    """A worker silent for this long, though pinged, is lost."""
    roster_silence_s: float = 5 * ROSTER_INTERVAL_S
    """A node silent for this long gets no new work."""
    keep_alive_s: float = 10.0
    """A stream silent for this long gets a comment."""
    grace_s: float = 10.0
    """How long streams may go on after SIGTERM."""
    max_body_bytes: int = 32 << 20
    verdict_wait_s: float = 1.0
    """How long a request waits for a reaper to say whether its lost worker died of it."""
    quarantine_ttl_s: float = 3600.0
    """How long a request that workers die of is refused; 0: never."""
