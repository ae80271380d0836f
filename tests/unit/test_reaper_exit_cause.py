"""Causes derived from a worker's exit status, messages and stderr."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mayfly_protocol.lifecycle import Bye, Exit
from mayfly_reaper.rules.backoff import backoff_s
from mayfly_reaper.rules.exit_cause import cause_line, describe_status, verdict_of_exit

SEGFAULT = """warming up
Fatal Python error: Segmentation fault

Thread 0x00007f5e37af7dd0 (most recent call first):
  File "engine.py", line 3 in step
"""
TRACEBACK = """Traceback (most recent call last):
  File "x.py", line 1, in <module>
ModuleNotFoundError: No module named 'mlx'

"""
METAL = (
    "[METAL] Command buffer execution failed: Caused GPU Timeout Error "
    "(00000002:kIOGPUCommandBufferCallbackErrorTimeout)"
)
ABORT = f"""{{"event": "serving"}}
libc++abi: terminating due to uncaught exception of type std::runtime_error: {METAL}
Fatal Python error: Aborted
"""
OTHER_ABORT = """terminate called after throwing an instance of 'std::logic_error'
  what():  basic_string: construction from null is not valid
"""


@pytest.mark.parametrize(
    ("status", "stderr", "kind", "scope", "cause"),
    [
        (-signal.SIGKILL, "", "killed", "worker", "SIGKILL from outside"),
        (-signal.SIGTERM, "", "killed", "worker", "SIGTERM from outside"),
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
            "metal_timeout",
            "worker",
            "killed by SIGABRT: libc++abi: terminating due to uncaught exception of type "
            f"std::runtime_error: {METAL}",
        ),
        (
            -signal.SIGABRT,
            OTHER_ABORT,
            "cxx_abort",
            "worker",
            "killed by SIGABRT: terminate called after throwing an instance of 'std::logic_error'",
        ),
        (-signal.SIGABRT, "", "aborted", "worker", "killed by SIGABRT"),
        (-signal.SIGUSR1, "", "unknown", "worker", "killed by SIGUSR1"),
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
    verdict = verdict_of_exit(status, stderr, None)
    assert (verdict.kind, verdict.scope, verdict.first.text) == (kind, scope, cause)


def test_a_kill_by_the_system_says_what_shows_it() -> None:
    verdict = verdict_of_exit(-signal.SIGKILL, "", None, oom_evidence="the count went from 0 to 1")
    assert (verdict.kind, verdict.scope) == ("killed_by_system", "machine")
    assert verdict.first.text == "SIGKILL from outside: the count went from 0 to 1"
    assert verdict.blames_requests


def test_a_signal_of_our_own_is_nobodys_hand() -> None:
    assert verdict_of_exit(-signal.SIGTERM, "", None, sent_by_us=True).kind == "wedged"
    assert verdict_of_exit(-signal.SIGSEGV, "", None, sent_by_us=True).kind == "crashed"


def test_requests_are_not_blamed_for_what_is_surely_not_theirs() -> None:
    assert not verdict_of_exit(-signal.SIGKILL, "", None).blames_requests
    assert verdict_of_exit(-signal.SIGSEGV, "", None).blames_requests


def test_what_a_worker_said_of_its_leaving_explains_more_than_its_stderr() -> None:
    verdict = verdict_of_exit(Exit.LOAD_FAILED, "Traceback ...", Bye(4, "the file is cut short"))
    assert verdict.text == "load_failed: exit status 4 (load failed): the file is cut short"


def test_statuses_without_a_name_are_described_too() -> None:
    assert describe_status(-64) in ("killed by signal 64", "killed by SIGRTMAX")
    assert describe_status(99) == "exit status 99"
    assert cause_line(" \n\n") == ""


@given(st.integers(1, 12) | st.integers(1, 10_000), st.floats(0, 1, exclude_max=True))
def test_a_delay_is_between_half_its_bound_and_its_bound(failures: int, draw: float) -> None:
    wait = backoff_s(failures, 1.0, 300.0, draw)
    bound = min(2.0 ** min(failures - 1, 99), 300.0)
    assert bound / 2 <= wait <= bound
