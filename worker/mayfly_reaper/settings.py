"""How a node is configured: which models, how many workers each and how long those live, how
patient the reaper is, and whether a front end goes with it.

How long to wait before trying again what has just failed.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from mayfly_protocol.common.logs import LogSettings
from mayfly_protocol.roster import SlotView
from mayfly_protocol.transport.addresses import PortRange


def delay(failures: int, first: float, longest: float, draw: float) -> float:
    """Seconds to wait after so many failures in a row (1 or more).

    Exponential with "equal jitter" (M. Brooker, "Exponential Backoff And Jitter", 2015): half of
    it is certain, so that no loop runs hot, half is drawn, so that many do not run in step.

    Args:
        first: the bound after one failure; doubled by each further one ...
        longest: ... up to this.
        draw: uniform in [0, 1).
    """
    bound = min(longest, first * 2.0 ** min(failures - 1, 30))
    return bound * (1 + draw) / 2


# -P: the folder that mayfly was started in must not shadow the worker's imports.
WORKER_COMMAND = (sys.executable, "-P", "-m", "mayfly_worker")


@dataclass(frozen=True, slots=True)
class Budgets:
    """How long a worker may take, in seconds, before the reaper calls it lost and what it does
    then. *Silent* is a worker that sends nothing; *still* is one that sends beats in which nothing
    moves."""

    hello_s: float = 60.0
    """From the spawn to the first message."""
    load_silent_s: float = 60.0
    """Importing an extension from a cold disk holds the GIL, and with it the beats."""
    load_still_s: float = 120.0
    silent_s: float = 5.0
    prefill_s: float = 30.0
    """For one chunk of a prompt."""
    decode_s: float = 20.0
    """For one step."""
    first_factor: float = 3.0
    """By how much the first step of a phase may be slower: kernels compile."""

    drain_s: float = 30.0
    """What runs may go on so long in a worker that is being recycled ..."""
    stop_s: float = 5.0
    """... and so long when the node stops."""
    leave_s: float = 5.0
    """From the end of the drain, or a worker's last words, to its exit."""
    stacks_s: float = 1.0
    """For writing every thread's stack to stderr."""
    terminate_s: float = 2.0
    """From SIGTERM to the next step."""
    teardown_s_per_gb: float = 0.1
    """What every 10^9 bytes of weights add to the times to leave: SIGKILL in the middle of a big
    teardown has stranded wired memory on macOS."""

    retry_s: float = 1.0
    """The first back-off; each further loss doubles it ..."""
    retry_max_s: float = 300.0
    """... up to here."""
    steady_s: float = 60.0
    """A worker that was READY so long clears its slot's record."""
    spacing_s: float = 1.0
    """Between two spawns of a slot, whatever the reason."""
    trial_losses: int = 2
    """After so many losses in a row the next worker is on trial: one request at a time ..."""
    trial_s: float = 60.0
    """... until it has served for so long ..."""
    trial_inferences: int = 20
    """... or finished so many choices."""

    batch_faults: int = 2
    """A worker that threw its batch away so often ..."""
    batch_window_s: float = 60.0
    """... within this time is recycled."""

    memory_return_s: float = 30.0
    """How long the memory of a process that is gone may take to be free again."""
    orphans_s: float = 45.0
    """How long the workers of a reaper before this one may take to finish and leave."""


@dataclass(frozen=True, slots=True)
class Lifetime:
    """When a healthy worker is replaced, before what wears out in it makes it fail. 0: never."""

    max_inferences: int = 10_000
    """Finished choices; drawn for each worker from a tenth less to a tenth more, so that workers
    that started together do not go together."""
    max_age_s: float = 0.0
    """Seconds since the spawn, drawn likewise."""
    max_footprint: int = 0
    """Bytes of memory of the process."""


@dataclass(frozen=True, slots=True)
class Pool:
    """The workers of one model. ``options`` are fields of
    :class:`mayfly_protocol.settings.WorkerSettings` that differ from their defaults;
    ``environment`` has the last word over what the reaper sets for a worker."""

    model_name: str
    model_path: Path
    workers: int = 1
    options: dict[str, object] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    lifetime: Lifetime = field(default_factory=Lifetime)


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """A front end that the reaper supervises. ``command`` is its argument list; the string
    ``{fd}`` in it stands for the number of the listening socket that it inherits, ``{node}`` for
    the node's control address, ``{grace}`` for the seconds that streams may go on in when the node
    stops. Port 0 takes a free one."""

    command: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Network:
    """Where front ends of other machines reach a node: its control port, the port after it for
    rosters, and one for each worker."""

    host: str
    port: int
    worker_ports: PortRange


@dataclass(frozen=True, slots=True)
class NodeSettings:
    node: str
    state_dir: Path
    pools: tuple[Pool, ...]
    front_end: FrontEnd | None = None
    metrics: Address | None = None
    """Where the node's own metrics are served over HTTP, in clear and to everyone."""
    network: Network | None = None
    """None: nobody but this machine's processes reaches the node."""
    preload_blas: bool = True
    """On Linux without a GPU, preload a shared OpenBLAS into workers if there is one."""
    caffeinate: bool = True
    """On macOS, keep the machine from falling asleep while the node runs."""
    budgets: Budgets = field(default_factory=Budgets)
    logs: LogSettings = field(default_factory=LogSettings)
    """Of the workers; how this process logs is up to whoever runs the node in it."""
    worker_command: tuple[str, ...] = WORKER_COMMAND
    """What ``--settings JSON`` is appended to."""


@dataclass(frozen=True, slots=True)
class About:
    """Which worker a note is about, if it is about one; ``bad`` news are losses and faults."""

    slot: str = ""
    incarnation: int = 0
    bad: bool = False


NOBODY = About()


class Observer(Protocol):
    """Is told what the node does, on the reaper's own thread; must not block."""

    def slot_changed(self, view: SlotView) -> None:
        """A slot's state, load progress or detail is different from last time."""

    def front_end_ready(self, host: str, port: int) -> None:
        """The supervised front end has answered for the first time."""

    def note(self, text: str, about: About = NOBODY) -> None:
        """A sentence for the operator: what was preloaded, what was lost and why."""
