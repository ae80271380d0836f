"""How a front end is configured."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from mayfly_protocol.common.logs import LogSettings
from mayfly_protocol.roster import ROSTER_INTERVAL_S
from mayfly_protocol.serving import PEER_TIMEOUT_S

MetricsAccess = Literal["admin", "open", "off"]


_KEPT_FILES = 256
"""Open files that are not for clients: those to nodes and workers, and of connections that are
being refused."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What a client's connection may cost before anything is known of who it is."""

    max_connections: int = 4096
    max_head_bytes: int = 32 << 10
    """Of a request's address and headers together."""
    max_headers: int = 128
    max_address_bytes: int = 8 << 10
    head_wait_s: float = 10.0
    """How long the head of a request may take to arrive ..."""
    body_wait_s: float = 30.0
    """... and its body ..."""
    body_bytes_per_s: float = 10_000.0
    """... to which a second is added for so many bytes that came."""
    slow_reader_s: float = 60.0
    """How long a client may leave unread what it was sent, beyond what fits on the way."""
    linger_s: float = 2.0
    """How long a connection that is being closed waits for its client to read the answer."""

    def within(self, open_files: int) -> ConnectionLimits:
        """With no more connections than a process with so many open files can hold and still
        answer the next one: where it has none left, the system cuts that without a word."""
        most = max(open_files - _KEPT_FILES, open_files // 2)
        return replace(self, max_connections=min(self.max_connections, most))


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """Times are seconds, sizes bytes."""

    nodes: tuple[str, ...]
    """Control addresses of the nodes whose workers are used: see
    :mod:`mayfly_protocol.transport.addresses`."""
    nodes_file: Path | None = None
    """A configuration file whose ``nodes`` are used instead as soon as it changes."""
    state_dir: Path | None = None
    """Where this front end's own key is, if it has one."""
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
    verdict_wait_s: float = 1.0
    """How long a request waits for a reaper to say whether its lost worker died of it."""
    quarantine_ttl_s: float = 3600.0
    """How long a request that workers die of is refused; 0: never."""
    request_timeout_s: float = 3600.0
    """How long a request may take in all; 0: as long as it likes."""
    max_unread_bytes: int = 4 << 20
    """What may wait for a client that does not read its stream, beyond what is on its way."""
    pong_wait_s: float = PEER_TIMEOUT_S
    """A worker silent for this long, though pinged, is lost."""
    roster_silence_s: float = 5 * ROSTER_INTERVAL_S
    """A node silent for this long gets no new work."""
    keep_alive_s: float = 10.0
    """A stream silent for this long gets a comment."""
    notice_s: float = 0.5
    """How long new connections are still taken after SIGTERM, while ``/readyz`` says no: as long as
    a load balancer may take to notice."""
    grace_s: float = 10.0
    """How long streams may go on after that."""
    max_body_bytes: int = 32 << 20
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    aliases: dict[str, str] = field(default_factory=dict)
    """Other names that requests may call models by."""
    api_keys_file: Path | None = None
    allowed_hosts: tuple[str, ...] = ()
    """Names that requests may be for, beside this machine's own: see
    :mod:`mayfly_server.http.hosts`."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may use this server: see :mod:`mayfly_server.http.origins`."""
    metrics: MetricsAccess = "admin"
    """Who may read ``/metrics`` once there are keys; ``off``: there is none."""
    node_metrics: bool = False
    """Whether ``/metrics`` also holds what the nodes count: on one machine, where nobody else asks
    them."""
    logs: LogSettings = field(default_factory=LogSettings)
    insecure: bool = False
    """Whether others may reach a server without keys."""


front_settings: TypeAdapter[FrontSettings] = TypeAdapter(FrontSettings)
