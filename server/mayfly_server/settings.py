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
"""Least value, in seconds, of settings for waiting on clients: 0 would leave them no time at
all."""
_KEPT_FILES = 256
"""Number of open files kept free for other uses than client connections: connections to nodes and
workers, and connections that are being refused."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits on connections of clients, which hold before a client has been authenticated."""

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
    """Number of received bytes of a request's body that extend ``body_wait_s`` by one second."""
    slow_reader_s: Annotated[
        float,
        seconds(
            "Seconds after which a client that does not read is disconnected.",
            at_least=_LEAST_WAIT_S,
        ),
    ] = 60.0
    linger_s: float = 2.0
    """Seconds that the server waits for a client to read its last answer before the connection is
    closed."""

    def within(self, open_files: int) -> ConnectionLimits:
        """Returns these limits with ``max_connections`` lowered, if necessary, for a process that
        may have ``open_files`` files open. A few files stay free, so that one more connection can
        be answered with an error instead of being dropped by the operating system."""
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
            guarded=True,
        ),
    ] = ()
    """Addresses of the nodes (machines with workers), as in ``tcp://KEY@HOST:PORT``."""
    nodes_file: Path | None = None
    """Configuration file whose list ``nodes`` replaces :attr:`nodes` whenever the file changes."""
    state_dir: Path | None = None
    """Folder with the key by which this front end authenticates itself to nodes, if it has a
    key."""
    api_keys_file: Annotated[
        Path | None,
        Option(
            "A file of API keys that requests need; `mayfly keys new` adds to it. Keys can also "
            "stand in the environment, as MAYFLY_API_KEYS and MAYFLY_ADMIN_KEY.",
            exists="file",
            convert=absolute,
        ),
    ] = None
    insecure: Annotated[bool, Option("Let others use this server without a key.", guarded=True)] = (
        False
    )
    """Allows a server without API keys to listen at addresses that other machines can reach."""
    allowed_hosts: Annotated[
        tuple[str, ...],
        Option(
            "Host names that requests may be for, besides this machine's own; * is any.",
            pattern=_HOST,
            example="mac.example.com",
            guarded=True,
        ),
    ] = ()
    cors_origins: Annotated[
        tuple[str, ...],
        Option(
            "Origins of web pages that may use this server; * is any.",
            pattern=_ORIGIN,
            example="https://app.example.com",
            guarded=True,
        ),
    ] = ()
    metrics: Annotated[
        MetricsAccess,
        Option(
            "Who may read /metrics once there are API keys: clients with an admin's key, everyone, "
            "or nobody.",
            guarded=True,
        ),
    ] = "admin"
    """Access to the path ``/metrics``; ``off`` removes the path."""
    node_metrics: bool = False
    """Includes the nodes' own metrics in ``/metrics``: for a server on one machine, where
    Prometheus does not ask the node itself."""
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
        int,
        Option(
            "Workers in a row that may fail with a request, without a new token, before it fails.",
            at_least=1,
        ),
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
            "Seconds after which a silent stream gets a sign of life, so that it stays open.",
            at_least=_LEAST_WAIT_S,
        ),
    ] = 5.0
    max_unread_bytes: Annotated[
        int,
        Option(
            "Bytes that may be buffered for a client that does not read its stream.", at_least=65536
        ),
    ] = 4 << 20
    """Largest number of bytes buffered for a client in this process; bytes that the operating
    system buffers are not counted."""
    accept_wait_s: float = 30.0
    """Seconds that a worker may take to accept or reject a request before the request is submitted
    to another worker."""
    stall_s: float = 180.0
    """Seconds that a worker may send nothing about a running request before the request continues
    on another worker: twice the longest time that a step of a worker may take before the worker is
    replaced."""
    verdict_wait_s: float = 1.0
    """Seconds that a request, whose worker has died, waits for the worker's node to tell if the
    request may have caused the death, before the request continues on another worker."""
    pong_wait_s: float = PEER_TIMEOUT_S
    """Seconds after which a worker that answers no pings counts as lost."""
    roster_silence_s: float = 5 * ROSTER_INTERVAL_S
    """Seconds without a roster (a node's list of its workers) after which the node gets no new
    requests."""
    notice_s: float = 0.5
    """Seconds after SIGTERM in which new connections are still accepted while ``/readyz`` already
    answers 503: the time that a load balancer may take to send no more requests."""
    grace_s: float = 10.0
    """Seconds that running streams may still go on at a shutdown, once the ``notice_s`` seconds for
    load balancers are over; streams that have not ended by then end with an error."""
    aliases: dict[str, str] = field(default_factory=dict)
    """The served model's name for each other name that requests may use for a model."""
    logs: LogSettings = field(default_factory=LogSettings)
