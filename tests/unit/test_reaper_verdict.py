"""What an exit means."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mayfly_protocol.lifecycle import Bye, Exit
from mayfly_reaper.backoff import delay
from mayfly_reaper.verdict import describe_status, of_exit, telling_line

SEGFAULT = """warming up
Fatal Python error: Segmentation fault

Thread 0x00007f5e37af7dd0 (most recent call first):
  File "engine.py", line 3 in step
"""
TRACEBACK = """Traceback (most recent call last):
  File "x.py", line 1, in <module>
ModuleNotFoundError: No module named 'mlx'

"""
ABORT = """libc++abi: terminating due to uncaught exception of type std::runtime_error: [METAL] x
Fatal Python error: Aborted
"""


@pytest.mark.parametrize(
    ("status", "stderr", "kind", "scope", "cause"),
    [
        (-signal.SIGKILL, "", "killed", "worker", "SIGKILL from outside"),
        (
            -signal.SIGSEGV,
            SEGFAULT,
            "crashed",
            "worker",
            "killed by SIGSEGV: Fatal Python error: Segmentation fault",
        ),
        (-signal.SIGBUS, "", "crashed", "worker", "killed by SIGBUS"),
        (
            -signal.SIGABRT,
            ABORT,
            "aborted",
            "worker",
            "killed by SIGABRT: libc++abi: terminating due to uncaught exception of type "
            "std::runtime_error: [METAL] x",
        ),
        (-signal.SIGTERM, "", "unknown", "worker", "killed by SIGTERM"),
        (
            1,
            TRACEBACK,
            "unknown",
            "worker",
            "exit status 1: ModuleNotFoundError: No module named 'mlx'",
        ),
        (
            1,
            "Timeout (0:00:20)!\nThread 0x1 (most recent call first):\n  File x\n",
            "wedged",
            "worker",
            "exit status 1: Timeout (0:00:20)!",
        ),
        (
            Exit.CONFIGURATION,
            "no such model",
            "configuration",
            "model",
            "exit status 3 (configuration): no such model",
        ),
        (Exit.LOAD_FAILED, "", "load_failed", "worker", "exit status 4 (load failed)"),
        (Exit.POISONED, "", "unknown", "worker", "exit status 70 (poisoned)"),
        (Exit.ORPHANED, "", "orphaned", "worker", "exit status 71 (orphaned)"),
        (Exit.BYE, "", "left", "worker", "exit status 0 (bye)"),
    ],
)
def test_an_exit_has_a_kind(status: int, stderr: str, kind: str, scope: str, cause: str) -> None:
    verdict = of_exit(status, stderr, None)
    assert (verdict.kind, verdict.scope, verdict.first.text) == (kind, scope, cause)


def test_what_a_worker_said_of_its_leaving_explains_more_than_its_stderr() -> None:
    verdict = of_exit(Exit.LOAD_FAILED, "Traceback ...", Bye(4, "the file is cut short"))
    assert verdict.text == "load_failed: exit status 4 (load failed): the file is cut short"


def test_statuses_without_a_name_are_described_too() -> None:
    assert describe_status(-64) in ("killed by signal 64", "killed by SIGRTMAX")
    assert describe_status(99) == "exit status 99"
    assert telling_line(" \n\n") == ""


@given(st.integers(1, 10_000), st.floats(0, 1, exclude_max=True))
def test_a_delay_is_between_half_its_bound_and_its_bound(failures: int, draw: float) -> None:
    wait = delay(failures, 1.0, 300.0, draw)
    bound = 2.0 ** (failures - 1) if failures < 9 else 300.0
    assert bound / 2 <= wait <= bound
