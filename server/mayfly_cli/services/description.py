"""The description of an operating system's service that runs Mayfly, for launchd or systemd."""

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
"""Seconds added to the time for stopping a service, since a busy machine ends processes slowly."""
_FRONT_EXTRA_S = 2.0
"""Seconds that a front end takes to send its last errors after its grace time
(``LAST_ERRORS_S`` in :mod:`mayfly_server.uvicorn_server`)."""


@dataclass(frozen=True, slots=True)
class Service:
    """A service to install.

    Attributes:
        role: the ``mayfly`` command that the service runs.
        scope: ``user`` for a service of the logged-in user, ``system`` for one of the machine.
        command: the program and its arguments, with absolute paths.
        stop_s: seconds from SIGTERM to SIGKILL when the service is stopped.
        stop_reason: a sentence with the reason for ``stop_s``, for a comment in the service's file.
        user: the user that a service of the machine runs as.
        listen: each ``ADDRESS:PORT`` of a front end whose sockets the service manager opens.
    """

    name: str
    role: Role
    scope: Scope
    command: tuple[str, ...]
    stop_s: int
    stop_reason: str
    user: str | None = None
    listen: tuple[str, ...] = ()


def node_stop_s(memory_bytes: int, budgets: Budgets) -> int:
    """Returns the seconds that a node may need from SIGTERM to its end: the sum of the timeouts of
    all steps by which a worker is ended, from asking it to leave to SIGKILL. Freeing
    ``memory_bytes`` of memory takes part of the time."""
    steps = [step_timeout(step, budgets.stop_s, memory_bytes, budgets) for step in ORDERLY]
    return math.ceil(sum(step for step in steps if math.isfinite(step)) + _MARGIN_S)


def front_stop_s(settings: FrontSettings) -> int:
    """Returns the seconds that a front end may need from SIGTERM to its end."""
    return math.ceil(settings.notice_s + settings.grace_s + _FRONT_EXTRA_S + _MARGIN_S)
