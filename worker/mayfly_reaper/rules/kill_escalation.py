"""Kill escalation: the steps that end a worker's process, and the time from each to the next.

::

    ORDERLY   drain --grace--> terminate ---> stacks ---> kill     recycled, stopped
    WHILE_STARTING             terminate ---> kill                 stopped while it loads
    WEDGED    stacks --------> terminate ---> kill                 no progress
    LEAVING   (wait) --------> stacks ------> kill                 said that it leaves, and stays
    AT_ONCE                                   kill                 silent; an impatient operator

``stacks`` is SIGUSR2: ``faulthandler`` writes the stack of every thread to stderr, even while the
GIL is held. For a wedged worker (one without progress) this step comes first: once SIGTERM has
ended the process, its stacks can no longer be read.
"""

from __future__ import annotations

import signal
from typing import Literal

from mayfly_reaper.settings import Budgets

KillStep = Literal["drain", "terminate", "stacks", "kill"]
Escalation = tuple[KillStep, ...]

ORDERLY: Escalation = ("drain", "terminate", "stacks", "kill")
WHILE_STARTING: Escalation = ("terminate", "kill")
WEDGED: Escalation = ("stacks", "terminate", "kill")
LEAVING: Escalation = ("stacks", "kill")
AT_ONCE: Escalation = ("kill",)

SIGNALS: dict[KillStep, signal.Signals] = {
    "terminate": signal.SIGTERM,
    "stacks": signal.SIGUSR2,
    "kill": signal.SIGKILL,
}


def leave_timeout(weight_bytes: int, budgets: Budgets) -> float:
    """Returns the seconds that a worker has to end its process after it has said that it leaves;
    more for larger weights."""
    return budgets.leave_s + _teardown_s(weight_bytes, budgets)


def step_timeout(step: KillStep, grace_s: float, weight_bytes: int, budgets: Budgets) -> float:
    """Returns the seconds from one step of ending a worker to the next step; ``grace_s`` is the
    time that a drain gives to running requests."""
    match step:
        case "drain":
            return grace_s + leave_timeout(weight_bytes, budgets)
        case "terminate":
            return budgets.terminate_s + _teardown_s(weight_bytes, budgets)
        case "stacks":
            return budgets.stacks_s
        case "kill":
            return float("inf")  # nothing is stronger: the kernel ends it when it can


def _teardown_s(weight_bytes: int, budgets: Budgets) -> float:
    return budgets.teardown_s_per_gb * weight_bytes / 1e9
