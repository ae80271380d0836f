"""A service's description, for any service manager."""

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
"""Reserve for processes to start and end on a busy machine."""
_FRONT_EXTRA_S = 2.0
"""Time that :mod:`mayfly_server.uvicorn_server` adds to the grace."""


@dataclass(frozen=True, slots=True)
class Service:
    """A service to install. ``command`` is its argument list, with absolute paths; ``user`` the
    user that it runs as in the system's scope; ``listen`` a front end's ``ADDRESS:PORT``, if the
    manager binds them; ``stop_s`` the seconds from SIGTERM to SIGKILL, ``stop_reason`` the reason
    for their number."""

    name: str
    role: Role
    scope: Scope
    command: tuple[str, ...]
    stop_s: int
    stop_reason: str
    user: str | None = None
    listen: tuple[str, ...] = ()


def node_stop_s(memory_bytes: int, budgets: Budgets) -> int:
    """Returns the seconds that a node needs from SIGTERM to its end: the timeouts of all steps by
    which the reaper ends a worker, with ``memory_bytes`` of memory to free."""
    steps = [step_timeout(step, budgets.stop_s, memory_bytes, budgets) for step in ORDERLY]
    return math.ceil(sum(step for step in steps if math.isfinite(step)) + _MARGIN_S)


def front_stop_s(settings: FrontSettings) -> int:
    """Returns the seconds that a front end needs from SIGTERM to its end."""
    return math.ceil(settings.notice_s + settings.grace_s + _FRONT_EXTRA_S + _MARGIN_S)
