"""How a worker is made to go: step by step, each with a time to work in.

::

    ORDERLY   drain --grace--> terminate ---> stacks ---> kill     recycled, stopped
    STARTING                   terminate ---> kill                 stopped while it loads
    WEDGED    stacks --------> terminate ---> kill                 no progress
    LEAVING   (wait) --------> stacks ------> kill                 said that it goes, and stays
    AT_ONCE                                   kill                 silent; an impatient operator

Stacks (SIGUSR2: ``faulthandler`` writes those of every thread to stderr, with the GIL held too)
come first for a worker that is wedged: what SIGTERM ends cannot be looked at any more.
"""

from __future__ import annotations

import signal
from typing import Literal

from mayfly_reaper.settings import Budgets

Rung = Literal["drain", "terminate", "stacks", "kill"]
Ladder = tuple[Rung, ...]

ORDERLY: Ladder = ("drain", "terminate", "stacks", "kill")
STARTING: Ladder = ("terminate", "kill")
WEDGED: Ladder = ("stacks", "terminate", "kill")
LEAVING: Ladder = ("stacks", "kill")
AT_ONCE: Ladder = ("kill",)

SIGNALS: dict[Rung, signal.Signals] = {
    "terminate": signal.SIGTERM,
    "stacks": signal.SIGUSR2,
    "kill": signal.SIGKILL,
}


def time_to_leave(weight_bytes: int, budgets: Budgets) -> float:
    """Seconds from a worker's last word to the end of its process."""
    return budgets.leave_s + _teardown_s(weight_bytes, budgets)


def patience(rung: Rung, grace_s: float, weight_bytes: int, budgets: Budgets) -> float:
    """Seconds from a rung to the next one; ``grace_s`` is what a drain was given."""
    match rung:
        case "drain":
            return grace_s + time_to_leave(weight_bytes, budgets)
        case "terminate":
            return budgets.terminate_s + _teardown_s(weight_bytes, budgets)
        case "stacks":
            return budgets.stacks_s
        case "kill":
            return float("inf")  # nothing is stronger: the kernel ends it when it can


def _teardown_s(weight_bytes: int, budgets: Budgets) -> float:
    return budgets.teardown_s_per_gb * weight_bytes / 1e9
