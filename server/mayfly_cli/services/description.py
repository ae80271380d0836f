"""What a service is, whatever manages it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from mayfly_reaper.rules.kill_escalation import ORDERLY, step_timeout
from mayfly_reaper.settings import Budgets
from mayfly_server.settings import FrontSettings

Role = Literal["serve", "node", "front"]
Scope = Literal["user", "system"]

_MARGIN_S = 5.0
"""For processes to start and end, and a busy machine."""
_FRONT_FAREWELL_S = 2.0
"""What :mod:`mayfly_server.uvicorn_server` adds to the grace."""


@dataclass(frozen=True, slots=True)
class Service:
    """``command`` is its argument list, with absolute paths. ``user`` is whom it runs as in the
    system's scope. ``listen`` are a front end's ``ADDRESS:PORT``, where the manager binds them.
    ``stop_s`` are the seconds from SIGTERM to SIGKILL, ``stop_reason`` a sentence about them."""

    name: str
    role: Role
    scope: Scope
    command: tuple[str, ...]
    stop_s: int
    stop_reason: str
    user: str | None = None
    listen: tuple[str, ...] = ()


def node_stop_s(memory_bytes: int, budgets: Budgets) -> int:
    """Seconds that a node needs from SIGTERM to its end: every rung of the ladder that its workers
    go down by, as long as they may take with as much memory as ``memory_bytes``."""
    rungs = [step_timeout(rung, budgets.stop_s, memory_bytes, budgets) for rung in ORDERLY]
    return math.ceil(sum(rung for rung in rungs if math.isfinite(rung)) + _MARGIN_S)


def front_stop_s(settings: FrontSettings) -> int:
    """Seconds that a front end needs from SIGTERM to its end."""
    return math.ceil(settings.notice_s + settings.grace_s + _FRONT_FAREWELL_S + _MARGIN_S)
