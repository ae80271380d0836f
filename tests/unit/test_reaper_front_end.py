"""The supervision of a front end, without a node around it."""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import zmq

from mayfly_reaper.processes.front_end import FrontEndProcess, listen
from mayfly_reaper.settings import Budgets, FrontEnd

pytestmark = pytest.mark.process

BUDGETS = Budgets(stop_s=0.2, leave_s=0.1)
DEAF = (
    "import signal, socket, sys;"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "connection = socket.socket(fileno=int(sys.argv[1])).accept()[0];"
    "connection.send(b'HTTP/1.1 503 Service Unavailable\\r\\n\\r\\n');"
    "sys.stdin.read()"
)
MUTE = "import socket, sys; socket.socket(fileno=int(sys.argv[1])).accept()[0].close()"


class SupervisedFrontEnd:
    """A front end's supervision, driven as the reaper's loop does it."""

    def __init__(self, *command: str) -> None:
        self.poller = zmq.Poller()
        self.notes: list[str] = []
        self.ready: list[tuple[str, int]] = []
        self.listener = listen("127.0.0.1", 0)
        self.front_end = FrontEndProcess(
            FrontEnd(command, port=0),
            self.listener,
            node="ipc:///node",
            budgets=BUDGETS,
            poller=self.poller,
            note=self.notes.append,
            ready=lambda host, port: self.ready.append((host, port)),
        )

    def tick_until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline, f"never; notes: {self.notes}"
            self.poller.poll(10)
            self.front_end.tick(time.monotonic())


@contextmanager
def supervised(*command: str) -> Iterator[SupervisedFrontEnd]:
    supervision = SupervisedFrontEnd(*command)
    try:
        yield supervision
    finally:
        supervision.front_end.kill()
        supervision.listener.close()


def test_any_answer_shows_that_it_is_up_and_one_that_will_not_stop_is_killed() -> None:
    with supervised(sys.executable, "-c", DEAF, "{fd}") as it:
        it.tick_until(lambda: it.ready)
        assert it.ready == [("127.0.0.1", it.listener.getsockname()[1])]
        stopped_at = time.monotonic()
        it.front_end.stop(stopped_at, hurry=False)
        assert not it.front_end.gone
        it.tick_until(lambda: it.front_end.gone)
        assert time.monotonic() - stopped_at >= BUDGETS.stop_s + BUDGETS.leave_s
        assert it.notes == []


def test_it_is_told_where_to_serve_whom_to_ask_and_how_long_to_stay() -> None:
    told = "import sys; print(*sys.argv[1:], file=open(sys.argv[1], 'w'))"
    with tempfile.NamedTemporaryFile("r") as file:
        with supervised(sys.executable, "-c", told, file.name, "{node}", "{grace}") as it:
            it.tick_until(lambda: it.notes)
        assert file.read().split() == [file.name, "ipc:///node", str(BUDGETS.stop_s)]


def test_a_hurried_stop_does_not_wait() -> None:
    with supervised(sys.executable, "-c", DEAF, "{fd}") as it:
        it.tick_until(lambda: it.ready)
        it.front_end.stop(0.0, hurry=True)
        it.tick_until(lambda: it.front_end.gone)


def test_one_that_closes_without_an_answer_is_not_up_and_is_tried_again_later() -> None:
    with supervised(sys.executable, "-c", MUTE, "{fd}") as it:
        it.tick_until(lambda: it.notes)
        now = time.monotonic()
        assert it.ready == []
        assert it.notes[0].startswith(
            "the front end ended: exit status 0 (bye); a new one starts in "
        )
        assert now < it.front_end.due <= now + BUDGETS.retry_s
        it.front_end.stop(now, hurry=False)
        assert it.front_end.gone


def test_one_that_cannot_be_started_is_said_and_tried_less_and_less_often() -> None:
    with supervised("/does/not/exist") as it:
        it.front_end.tick(100.0)
        assert "cannot be started: [Errno 2]" in it.notes[0]
        pauses = []
        now = 100.0
        for _ in range(5):
            pauses.append(it.front_end.due - now)
            now = it.front_end.due
            it.front_end.tick(now)
        for failures, pause in enumerate(pauses):
            assert 2**failures / 2 <= pause <= 2**failures
        assert len(it.notes) == 6


def test_the_command_is_told_the_socket_and_the_node() -> None:
    check = "import sys; sys.exit(int(sys.argv[1] == 'ipc:///node' and int(sys.argv[2]) > 2) + 40)"
    with supervised(sys.executable, "-c", check, "{node}", "{fd}") as it:
        it.tick_until(lambda: it.notes)
        assert "exit status 41" in it.notes[0]


def test_a_signal_that_ended_it_is_named() -> None:
    kill = f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})"
    with supervised(sys.executable, "-c", kill) as it:
        it.tick_until(lambda: it.notes)
        assert "killed by SIGKILL" in it.notes[0]
