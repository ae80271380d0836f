"""Settings of a front end."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from mayfly_protocol.options import Option, absolute, seconds
from mayfly_protocol.roster import ROSTER_INTERVAL_S
from mayfly_protocol.settings import PEER_TIMEOUT_S, LogSettings

MetricsAccess = Literal["admin", "open", "off"]

_HOST = r"\*|(\*\.)?[A-Za-z0-9_.-]+|(?=.*:.*:)[0-9A-Fa-f:.]+"
_ORIGIN = r"\*|null|[a-z][a-z0-9+.-]*://[^/?#\sA-Z]+"
_LEAST_WAIT_S = 0.1
"""Shortest wait for a client, which cannot be none at all."""
_KEPT_FILES = 256
"""Open files that are not for clients: those to nodes and workers, and of connections that are
being refused."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of a client's connection before the client is authenticated."""

    max_connections: Annotated[int, Option("Connections at a time.", at_least=1)] = 4096
    max_head_bytes: Annotated[
        int, Option("Largest size of a request's address and headers together.", at_least=1024)
    ] = 32 << 10
    max_headers: Annotated[int, Option("Headers that a request may have.", at_least=16)] = 128
    max_address_bytes: Annotated[
        int, Option("Largest size of a request's address.", at_least=256)
    ] = 8 << 10
    head_wait_s: Annotated[
        float,
        seconds("Seconds that a request's headers may take to arrive.", at_least=_LEAST_WAIT_S),
    ] = 10.0
    body_wait_s: Annotated[
        float,
        seconds(
            "Seconds that a request's body may take to arrive, and one more for each 10 kB that "
            "arrived.",
            at_least=_LEAST_WAIT_S,
        ),
    ] = 30.0
    body_bytes_per_s: float = 10_000.0
    """Received bytes of a body that add a second to ``body_wait_s``."""
    slow_reader_s: Annotated[
        float,
        seconds(
            "Seconds after which a client that does not read is disconnected.",
            at_least=_LEAST_WAIT_S,
        ),
    ] = 60.0
    linger_s: float = 2.0
    """Time that a connection which is being closed waits for its client to read the answer."""

    def within(self, open_files: int) -> ConnectionLimits:
        """Returns limits with no more connections than a process with this number of open files can
        hold and still answer the next one: without a file left for it, the system drops that
        connection unanswered."""
        most = max(open_files - _KEPT_FILES, open_files // 2)
        return replace(self, max_connections=min(self.max_connections, most))


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """Settings of a front end. Times are seconds, sizes bytes."""

    nodes: Annotated[
        tuple[str, ...],
        Option(
            "A node whose workers are used: tcp://KEY@HOST:PORT, with the KEY that `mayfly keys "
            "show` prints on that node.",
            flag="--node",
        ),
    ] = ()
    """Control addresses: see :mod:`mayfly_protocol.transport.addresses`."""
    nodes_file: Path | None = None
    """Configuration file whose ``nodes`` replace those above as soon as it changes."""
    state_dir: Path | None = None
    """Folder with this front end's own key, if it has one."""
    api_keys_file: Annotated[
        Path | None,
        Option(
            "A file of API keys that requests need; `mayfly keys new` adds to it. Keys can also "
            "stand in the environment, as MAYFLY_API_KEYS and MAYFLY_ADMIN_KEY.",
            exists="file",
            convert=absolute,
        ),
    ] = None
    insecure: Annotated[bool, Option("Let others use this server without a key.")] = False
    """Lets a server without API keys listen where others reach it."""
    allowed_hosts: Annotated[
        tuple[str, ...],
        Option(
            "Host names that requests may be for, besides this machine's own; * is any.",
            pattern=_HOST,
            example="mac.example.com",
        ),
    ] = ()
    cors_origins: Annotated[
        tuple[str, ...],
        Option(
            "Origins of web pages that may use this server; * is any.",
            pattern=_ORIGIN,
            example="https://app.example.com",
        ),
    ] = ()
    metrics: Annotated[
        MetricsAccess,
        Option(
            "Who may read /metrics once there are API keys: clients with an admin's key, everyone, "
            "or nobody."
        ),
    ] = "admin"
    """``off``: there is no ``/metrics``."""
    node_metrics: bool = False
    """Include the nodes' own counters in ``/metrics``: on one machine, where nobody else asks for
    them."""
    max_body_bytes: Annotated[int, Option("Largest size of a request's body.", at_least=1024)] = (
        32 << 20
    )
    strict_fields: Annotated[
        bool,
        Option(
            "Refuse requests with fields that no API here knows, instead of ignoring these fields "
            "and naming them in the answer's header mayfly-ignored."
        ),
    ] = False
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    queue_wait_s: Annotated[
        float, seconds("Seconds that a request waits for a worker that is being loaded.")
    ] = 30.0
    failover_wait_s: Annotated[
        float, seconds("Seconds that a request whose worker was lost waits for another worker.")
    ] = 120.0
    max_attempts: Annotated[
        int, Option("Workers that a request may lose before it fails.", at_least=1)
    ] = 5
    request_timeout_s: Annotated[
        float, seconds("Seconds that a request may take in all; 0: no limit.")
    ] = 3600.0
    quarantine_ttl_s: Annotated[
        float,
        seconds(
            "Seconds for which a request that workers died of is refused; 0: it is never refused."
        ),
    ] = 3600.0
    keep_alive_s: Annotated[
        float,
        seconds(
            "Seconds after which a silent stream gets a comment, which keeps its connection open.",
            at_least=_LEAST_WAIT_S,
        ),
    ] = 10.0
    max_unread_bytes: Annotated[
        int,
        Option(
            "Bytes that may be buffered for a client that does not read its stream.", at_least=65536
        ),
    ] = 4 << 20
    """Beyond what is on its way in the network."""
    accept_wait_s: float = 30.0
    """Time after which a worker that has neither accepted nor rejected a request counts as lost to
    it."""
    stall_s: float = 180.0
    """Time after which a worker that sends nothing about a running request counts as lost to it:
    twice the longest that a reaper lets one step take."""
    verdict_wait_s: float = 1.0
    """Time that a request waits for a reaper's verdict on whether its lost worker died of it."""
    pong_wait_s: float = PEER_TIMEOUT_S
    """Silence, in spite of pings, after which a worker is lost."""
    roster_silence_s: float = 5 * ROSTER_INTERVAL_S
    """Silence after which a node gets no new work."""
    notice_s: float = 0.5
    """Time after SIGTERM in which new connections are still accepted while ``/readyz`` refuses: as
    long as a load balancer may take to notice."""
    grace_s: float = 10.0
    """Time that streams may go on for after ``notice_s``."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Other names of models that requests may use."""
    logs: LogSettings = field(default_factory=LogSettings)
