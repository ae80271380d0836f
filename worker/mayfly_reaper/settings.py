"""How a node is configured: which models, how many workers each, and whether a front end goes
with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from mayfly_protocol.roster import SlotView


@dataclass(frozen=True, slots=True)
class Pool:
    """The workers of one model. ``options`` are fields of
    :class:`mayfly_protocol.settings.WorkerSettings` that differ from their defaults."""

    model_name: str
    model_path: Path
    workers: int = 1
    options: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """A front end that the reaper supervises. ``command`` is its argument list; the string
    ``{fd}`` in it stands for the number of the listening socket that it inherits, ``{node}`` for
    the node's control address."""

    command: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000


@dataclass(frozen=True, slots=True)
class NodeSettings:
    node: str
    state_dir: Path
    pools: tuple[Pool, ...]
    front_end: FrontEnd | None = None
    preload_blas: bool = True
    """On Linux without a GPU, preload a shared OpenBLAS into workers if there is one."""


class Observer(Protocol):
    """Is told what the node does, on the reaper's own thread; must not block."""

    def slot_changed(self, view: SlotView) -> None:
        """A slot's state, load progress or detail is different from last time."""

    def front_end_ready(self, host: str, port: int) -> None:
        """The supervised front end has answered for the first time."""

    def note(self, text: str) -> None:
        """A sentence for the operator: what was preloaded, what was lost and why."""
