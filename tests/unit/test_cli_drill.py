"""``mayfly drill``: conclusions from the chunks that it saw, and cases that it refuses."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from mayfly_cli.app import app
from mayfly_cli.commands import drill
from mayfly_cli.drill import workers as pool
from mayfly_cli.drill.load import CompletionStream
from mayfly_cli.drill.report import SentSignal, interruptions, make_report
from support.doubles.fake_node import FakeNode, answer_words
from support.running_front import RunningFront


def steady(
    request: int = 0, *, begin: float = 0.0, stands: float = 0.0, at: int = 10
) -> CompletionStream:
    """Twenty chunks, 0.1 s apart, with one longer gap before chunk ``at``."""
    times = [begin + 0.1 * n + (stands if n >= at else 0.0) for n in range(20)]
    return CompletionStream(request, begin, times, "text", 20, "length")


def struck(at: float, full_at: float | None = 5.0, continued: int | None = 1) -> SentSignal:
    return SentSignal("SIGKILL", "node/slot-0", 123, at, full_at, continued)


def test_what_stands_still_after_a_strike_was_interrupted() -> None:
    streams = [
        steady(stands=1.0),
        steady(),
        steady(begin=5.0, stands=1.0),
        steady(begin=-5.0, stands=1.0),
        CompletionStream(0, 0.0, [0.95], "t", 1, "length"),
    ]
    assert interruptions(streams, at=0.95) == [pytest.approx(1.1)]
    assert interruptions(streams, at=0.5) == [pytest.approx(1.1)], "its last words came later"
    assert interruptions(streams, at=20.0) == []


def test_a_report_of_a_drill_that_went_well() -> None:
    found = make_report([steady(stands=1.0), steady()], [struck(0.95)], {0: "text"})
    assert found.passed
    lines = found.lines()
    assert "SIGKILL  node/slot-0 (pid 123): 1 streams interrupted, 1.10 s on average" in lines[0]
    assert "full capacity after 4.0 s" in lines[0] or "full capacity after 4.1 s" in lines[0]
    assert lines[1] == "requests               2, 0 failed, 1 continued"
    assert found.as_json()["strikes"][0]["recovery_s"] == pytest.approx(4.05)


def test_a_lost_request_or_a_pool_that_stays_small_is_a_failure() -> None:
    lost = CompletionStream(0, 0.0, error="the stream has no end")
    assert not make_report([lost], [struck(0.5)], {0: "text"}).passed
    assert "failed: the stream has no end" in make_report([lost], [struck(0.5)], {}).lines()
    small = make_report([steady()], [struck(0.5, full_at=None)], {0: "text"})
    assert not small.passed
    assert "not in time" in small.lines()[0]
    idle = make_report([steady()], [], {0: "text"}, unsent=2)
    assert not idle.passed
    assert idle.lines()[-1].startswith("not sent               2")


def test_other_words_are_told_and_no_failure() -> None:
    found = make_report([steady()], [struck(0.5, continued=None)], {0: "other text"})
    assert (found.passed, found.reworded) == (True, 1)
    assert "continued" not in "\n".join(found.lines())
    assert found.lines()[-1].startswith("other wording")


STATUS = {
    "nodes": [
        {
            "node": "mac",
            "slots": [
                {
                    "slot": "tiny-0",
                    "pid": os.getpid(),
                    "incarnation": 4,
                    "state": "ready",
                    "model": "tiny",
                    "running": 2,
                    "waiting": 1,
                    "inferences": 7,
                    "generated_tokens": 70,
                }
            ],
        }
    ]
}


def test_a_process_that_is_no_worker_is_left_alone() -> None:
    [worker] = pool.workers_of(STATUS)
    assert (worker.slot, worker.busy, worker.done) == ("mac/tiny-0", 3, (7, 70))
    assert not worker.is_local
    assert pool.busiest(lambda: [worker]) is None
    assert pool.signal_busiest(lambda: [worker], signal.SIGKILL, 0.2) is None


def run(front: RunningFront, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["drill", "--url", front.url, *arguments])


@pytest.fixture
def unstruck(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """No process is ever sent a signal; what would have been is collected."""
    sent: list[Any] = []
    monkeypatch.setattr(pool.os, "kill", lambda pid, number: sent.append((pid, number)))
    monkeypatch.setattr(pool.PoolWorker, "is_local", property(lambda self: True))
    monkeypatch.setattr(drill, "WATCH_S", 0.6)
    return sent


def test_it_asks_before_it_touches_a_pool_that_others_use(unstruck: list[Any]) -> None:
    with FakeNode() as node:
        node.worker(answer_words(), running=1)
        with RunningFront(node.control) as front:
            refused = run(front)
            assert refused.exit_code == 1
            assert "others use this pool; --yes drills it all the same" in refused.stderr
    assert unstruck == []


def test_it_wants_a_whole_pool_of_one_model(unstruck: list[Any]) -> None:
    with FakeNode() as node:
        node.worker(answer_words())
        node.worker(answer_words(), state="loading")
        with RunningFront(node.control) as front:
            front.wait_workers(1)
            assert "not all workers of the pool are ready" in run(front, "--yes").stderr
            node.show(node.view("slot-1").__class__("x", "other", "ready", 9))
            front.wait(lambda: len(front.front.fleet.models()) == 2)
            assert "name one with --model: other, tiny" in run(front, "--yes").stderr
            assert "no worker of third is known" in run(front, "--model", "third").stderr
    assert unstruck == []


def test_a_server_that_fails_by_itself_is_not_drilled(unstruck: list[Any]) -> None:
    with FakeNode() as node:
        node.worker(answer_words("too", " short"))
        with RunningFront(node.control) as front:
            refused = run(front, "--yes")
            assert refused.exit_code == 1
            assert "fails before the first signal: 2 tokens instead of 128" in refused.stderr
    assert unstruck == []


def test_a_pool_that_does_not_come_back_is_woken_and_told(unstruck: list[Any]) -> None:
    with FakeNode() as node:
        worker = node.worker(answer_words(*["word "] * 5, end="length"))
        with RunningFront(node.control) as front:
            told = run(front, *("--yes", "--tokens", "5", "--signals", "stop", "--wait", "1"))
            assert told.exit_code == 1
            assert "full capacity after not in time" in told.stdout
    assert unstruck == [(1001, signal.SIGSTOP), (1001, signal.SIGCONT)]
    assert worker.submits


@pytest.mark.parametrize("signals", ["hup", "kill,,stop", ""])
def test_unknown_signals(signals: str) -> None:
    result = CliRunner().invoke(app, ["drill", "--signals", signals])
    assert result.exit_code == 2
