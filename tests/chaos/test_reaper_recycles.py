"""Workers that are replaced all the time, while a server is used."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from mayfly_reaper.paths import runtime_of
from support.models.scripted import ModelFault, ScriptedReply
from support.server import Server, serving, wait_for

REPLY = " ".join(f"word{number}" for number in range(8))
CLIENTS = 3


class RepeatingClients:
    """Clients that ask again as soon as they are answered. To be entered."""

    def __init__(self, server: Server) -> None:
        self.answered = 0
        self.failures: list[object] = []
        self._server = server
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(CLIENTS)]

    def __enter__(self) -> RepeatingClients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                text = self._server.chat("go", max_tokens=None).choices[0].message.content
            except Exception as error:
                self.failures.append(error)
                return
            if text != REPLY:
                self.failures.append(text)
            self.answered += 1


def test_a_worker_that_leaks_is_replaced_before_memory_ends(
    scripted_model: Callable[..., Path], tmp_path: Path
) -> None:
    leaks = ScriptedReply("[leak]", REPLY, [ModelFault(3, "leak", "600", times=1)])
    model = scripted_model([leaks], step_s=0.02)
    options = ("--trust-remote-code", "--max-footprint", "0.5")
    with serving(model, tmp_path, *options, budgets={"spacing_s": 0.0}) as server:
        first = server.slot()["incarnation"]
        answer = server.chat("[leak]", max_tokens=None)
        assert answer.choices[0].message.content == REPLY
        wait_for(lambda: server.slots()[0]["incarnation"] > first, "a successor")
        assert server.chat("[leak]", max_tokens=None).choices[0].message.content == REPLY
        wait_for(lambda: len(server.slots()) == 1, "the end of the worn worker")
        [worker] = [p for p in server.processes() if "mayfly_worker" in " ".join(p.cmdline())]
        assert worker.memory_info().rss < 500e6
        assert server.autopsies() == []
        assert "bytes of memory" in server.log()


def size_of(processes: list[psutil.Process]) -> list[tuple[int, float]]:
    """Open files, and memory in MB."""
    return [(p.num_fds(), p.memory_info().rss / 1e6) for p in processes]


@pytest.mark.parametrize(
    "recycles",
    [
        pytest.param(20, marks=pytest.mark.timeout(600)),
        pytest.param(500, marks=[pytest.mark.long, pytest.mark.timeout(7200)]),
    ],
)
def test_forced_recycles_fail_no_request_and_leave_nothing(
    scripted_model: Callable[..., Path],
    tmp_path: Path,
    recycles: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = scripted_model([ScriptedReply("go", REPLY)], step_s=0.02)
    options = ("--trust-remote-code", "--max-inferences", "2")
    budgets = {"retry_s": 0.1, "spacing_s": 0.0}
    with serving(model, tmp_path, *options, budgets=budgets) as server:
        first = server.slot()["incarnation"]
        lasting = [p for p in server.processes() if "mayfly_worker" not in " ".join(p.cmdline())]
        assert len(lasting) == 2  # the reaper and the front end

        def recycled(times: int) -> None:
            wait_for(
                lambda: max(s["incarnation"] for s in server.slots()) >= first + times,
                f"{times} recycles",
                30.0 * times,
            )

        with RepeatingClients(server) as load:
            recycled(recycles // 2)
            middle = size_of(lasting)
            recycled(recycles)
            end = size_of(lasting)
        with capsys.disabled():
            print(f"\n{load.answered} answers; (fds, MB) of reaper, front end: {middle}, {end}")
        assert load.failures == []
        assert server.autopsies() == []
        for (files, memory), (files_before, memory_before) in zip(end, middle, strict=True):
            assert files <= files_before + 8  # those of the workers that come and go just now
            assert memory <= memory_before + 8
        assert server.stop() == 0
        wait_for(lambda: not server.processes(), "every process to end", 15)
        assert not runtime_of(server.state_dir).folder.exists()
        assert not list((server.state_dir / "stderr").iterdir())
