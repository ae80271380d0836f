"""Settings of a node: its models and their workers, the timeouts of the reaper, and the front end
that it may supervise."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from mayfly_protocol.options import Option, seconds, size
from mayfly_protocol.settings import LogSettings
from mayfly_protocol.transport.addresses import PortRange, port_range

# -P: the folder that mayfly was started in must not shadow the worker's imports.
WORKER_COMMAND = (sys.executable, "-P", "-m", "mayfly_worker")
WORKER_PORTS = PortRange(7710, 7799)


@dataclass(frozen=True, slots=True)
class Budgets:
    """Time limits for a worker, in seconds: how long the reaper (its supervisor) waits before it
    counts a worker as lost, and how long each step of ending and replacing a worker may take. A
    *silent* worker sends no message; a *still* worker sends heartbeats that report no progress."""

    hello_s: float = 60.0
    """Longest time from the start of a worker process to its first message."""
    load_silent_s: float = 60.0
    """Time without a message after which a loading worker is lost; importing an extension from a
    cold disk holds the GIL, and so delays heartbeats."""
    stop_s: Annotated[
        float,
        seconds("Seconds that requests may go on for when the server stops.", "stop_grace"),
    ] = 5.0
    drain_s: Annotated[
        float,
        seconds("Seconds that requests may go on for in a worker that is replaced.", "drain_grace"),
    ] = 30.0
    silent_s: Annotated[
        float,
        seconds("Seconds without a message after which a worker is lost.", "silent_budget", 1),
    ] = 5.0
    load_still_s: Annotated[
        float,
        seconds("Seconds without progress after which a loading worker is lost.", "load_budget", 1),
    ] = 120.0
    prefill_s: Annotated[
        float, seconds("Seconds that one chunk of a prompt may take.", "prefill_budget", 1)
    ] = 30.0
    decode_s: Annotated[
        float, seconds("Seconds that one decoding step may take.", "decode_budget", 1)
    ] = 20.0
    first_factor: float = 3.0
    """Factor on the time limit for a worker's first step in a phase (such as prefill), in which
    kernels compile."""

    leave_s: float = 5.0
    """Longest time from the end of a worker's drain, or from its message that it leaves, to its
    exit."""
    stacks_s: float = 1.0
    """Time that a worker has to write every thread's stack to stderr before it gets SIGTERM or
    SIGKILL."""
    terminate_s: float = 2.0
    """Time that a worker has to exit after SIGTERM, until the next step, such as SIGKILL."""
    teardown_s_per_gb: float = 0.1
    """Seconds added to a worker's time to exit for every 10^9 bytes of weights: SIGKILL in the
    middle of a big teardown has left wired memory lost on macOS."""

    retry_s: float = 1.0
    """The first pause before a lost worker is replaced; each further loss in a row doubles the
    pause."""
    retry_max_s: Annotated[
        float,
        seconds("Longest pause before a lost worker is replaced, in seconds.", at_least=1),
    ] = 300.0
    steady_s: float = 60.0
    """Time of serving after which a worker clears its slot's count of losses."""
    spacing_s: float = 1.0
    """Shortest time between two starts of a worker in a slot, whatever the reason."""
    trial_losses: int = 2
    """Losses of workers in a row after which a slot's next worker is on trial: it gets only
    requests that no other worker can take."""
    trial_s: float = 60.0
    """Time of serving that ends a worker's trial, in which it is the last choice."""
    trial_inferences: int = 20
    """Finished answers that end a worker's trial, in which it is the last choice."""

    batch_faults: int = 2
    """Batches lost to faults within ``batch_window_s`` after which a worker is replaced."""
    batch_window_s: float = 60.0

    memory_return_s: float = 30.0
    """Time after a worker's exit in which its memory is expected to be free again."""
    orphans_s: float = 45.0
    """Time for workers that an earlier, killed reaper left behind to finish their requests and
    leave."""


@dataclass(frozen=True, slots=True)
class Lifetime:
    """Limits at which a healthy worker is replaced, before a leak in the worker makes it fail. A
    limit of 0 stands for none."""

    max_inferences: Annotated[
        int,
        Option(
            "Replace a worker after this number of finished answers, a tenth more or less; "
            "0: never.",
            at_least=0,
        ),
    ] = 10_000
    """Finished answers after which a worker is replaced. Each worker's limit is a random number
    from 0.9 to 1.1 times this setting, so that workers that started together are not replaced
    together."""
    max_age_s: Annotated[
        float, seconds("Replace a worker after this number of seconds; 0: never.")
    ] = 0.0
    """Seconds since its start after which a worker is replaced; each worker's limit is a random
    number from 0.9 to 1.1 times this setting."""
    max_footprint: Annotated[
        int, size("Replace a worker that takes this number of GB of memory; 0: never.")
    ] = 0
    """Bytes of memory of a worker's process at which the worker is replaced."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Settings of the workers of one model. ``options`` are fields of
    :class:`mayfly_protocol.settings.WorkerSettings` that differ from their defaults;
    ``environment`` holds variables that override those that the reaper sets for a worker."""

    model_name: str
    model_path: Path
    workers: Annotated[int, Option("Worker processes, each with the model.", at_least=1)] = 1
    options: dict[str, object] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    lifetime: Lifetime = field(default_factory=Lifetime)


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """Settings of a front end process that the reaper supervises. ``command`` is its argument list;
    the string ``{fd}`` in it stands for the number of the listening socket that the front end
    inherits, ``{node}`` for the node's control address, ``{grace}`` for the seconds that streams
    may go on for when the node stops."""

    command: tuple[str, ...]
    host: Annotated[str, Option("The address to listen on.", guarded=True)] = "127.0.0.1"
    port: Annotated[
        int, Option("The port to listen on; 0: any free one.", at_least=0, at_most=65535)
    ] = 8000


@dataclass(frozen=True, slots=True)
class MetricsAddress:
    """Address at which a node's own metrics are served over HTTP, unencrypted and to everyone; with
    ``port`` None, nothing is served."""

    port: Annotated[
        int | None,
        Option(
            "Also serve the metrics of the reaper and the workers on this port; /metrics holds "
            "them in any case.",
            name="metrics_port",
            at_least=1,
            at_most=65535,
        ),
    ] = None
    host: Annotated[
        str,
        Option(
            "The address for --metrics-port. Everyone who reaches it can read the metrics without "
            "a key.",
            name="metrics_host",
            guarded=True,
        ),
    ] = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Network:
    """Address at which front ends on other machines reach a node: its control port, the next port
    for rosters (the node's published state), and one port for each worker."""

    host: Annotated[
        str,
        Option(
            "The address at which front ends reach this node.", name="control_host", guarded=True
        ),
    ] = "127.0.0.1"
    port: Annotated[
        int,
        Option(
            "The port at which front ends reach this node; the next port is used, too.",
            name="control_port",
            at_least=1,
            at_most=65534,
        ),
    ] = 7700
    worker_ports: Annotated[
        PortRange,
        Option("The ports of this node's workers, one for each.", type=str, convert=port_range),
    ] = WORKER_PORTS


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """Settings of a node: its reaper, its models with their workers, and its front end."""

    node: str
    state_dir: Path
    pools: tuple[Pool, ...]
    front_end: FrontEnd | None = None
    metrics: MetricsAddress = field(default_factory=MetricsAddress)
    network: Network | None = None
    """Address for front ends on other machines; None if only processes of this machine reach the
    node."""
    budgets: Budgets = field(default_factory=Budgets)
    preload_blas: Annotated[
        bool,
        Option("On Linux without a GPU, preload a shared OpenBLAS into workers if there is one."),
    ] = True
    caffeinate: Annotated[bool, Option("On macOS, keep the machine awake while the node runs.")] = (
        True
    )
    logs: LogSettings = field(default_factory=LogSettings)
    """Log settings of the workers; the reaper's own log is configured by its caller."""
    worker_command: tuple[str, ...] = WORKER_COMMAND
    """Command line of a worker, to which ``--settings JSON`` is appended."""
