"""Long and short requests, many of them cancelled: nothing leaks, and memory reaches a plateau."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import pytest

from conformance.test_cases_lifecycle import given_up
from mayfly_protocol.counters import Memory
from mayfly_protocol.lifecycle import Beat
from mayfly_protocol.requests import Generation, TokenPrompt
from mayfly_protocol.serving import Cancel, Finish
from support.api_client import CHAT, together, user
from support.api_client import answer as answer_of
from support.server import Server
from support.worker import AttemptAnswer, WorkerProcess, generation

PREFIX_BYTES = 1 << 20
MB = 1 << 20


@dataclass
class LoadGenerator:
    """Requests to one worker, at most ``most`` at a time; a part of them is cancelled, at once or
    after some tokens."""

    worker: WorkerProcess
    rng: random.Random
    most: int
    cancelled: float

    def run(self, count: int, make: Callable[[random.Random], Generation]) -> list[AttemptAnswer]:
        doomed: list[tuple[int, AttemptAnswer]] = []
        answers: list[AttemptAnswer] = []
        open_: list[AttemptAnswer] = []

        def in_flight() -> int:
            open_[:] = [answer for answer in open_ if not answer.end]
            for entry in list(doomed):
                patience, unwanted = entry
                if unwanted.end or len(unwanted.deltas) >= patience:
                    doomed.remove(entry)
                    self.worker.send(Cancel(unwanted.rid, 1))
            return len(open_)

        for _ in range(count):
            answers.append(self.worker.submit(make(self.rng)))
            open_.append(answers[-1])
            if self.rng.random() < self.cancelled:
                doomed.append((self.rng.choice([0, 0, 1, 5, 20]), answers[-1]))
            self.worker.wait(lambda: in_flight() < self.most, "room for another one")
        self.worker.wait(lambda: in_flight() == 0, "the last ones")
        return answers

    def idle(self) -> Memory:
        """Waits until the worker says that it has nothing to do; returns what it holds then."""
        seen = len(self.worker.received)
        beats = self.worker.wait(
            lambda: [
                beat
                for beat in self.worker.received[seen:]
                if isinstance(beat, Beat)
                and (beat.phase, beat.running, beat.waiting) == ("idle", 0, 0)
            ],
            "an idle worker",
        )
        return beats[-1].memory


def mixed(rng: random.Random) -> Generation:
    length = rng.choice([1, 5, 20, 60, 250, 600])
    return generation(
        TokenPrompt(tuple(rng.randrange(8, 1700) for _ in range(length))),
        max_tokens=rng.choice([1, 4, 16, 80]),
        temperature=rng.choice([0.0, 0.9]),
        seed=rng.randrange(1 << 30),
        n=rng.choice([1, 1, 1, 3]),
        repetition_penalty=rng.choice([1.0, 1.2]),
        logprobs=rng.choice([None, None, 3]),
    )


def distinct(rng: random.Random) -> Generation:
    length = rng.randrange(4, 160)
    return generation(
        TokenPrompt(tuple(rng.randrange(8, 1700) for _ in range(length))),
        max_tokens=rng.randrange(1, 12),
    )


@pytest.fixture
def worker(tiny_model: Path, tmp_path: Path) -> WorkerProcess:
    return WorkerProcess(
        tiny_model, tmp_path, max_rows=8, prefix_cache=PREFIX_BYTES, beat_interval_s=0.05
    )


@pytest.mark.parametrize("count", [200, pytest.param(3000, marks=pytest.mark.long)])
def test_mixed_requests_with_random_cancels_leave_nothing(
    worker: WorkerProcess, count: int
) -> None:
    last = generation("What comes after all of them", max_tokens=30)
    with worker:
        worker.wait_ready()
        right = worker.ask(last).ids()
        load = LoadGenerator(worker, random.Random(6), most=24, cancelled=0.4)
        load.run(40, mixed)
        before = load.idle()
        answers = load.run(count, mixed)
        after = load.idle()
        ends = [a.end.reason for a in answers if isinstance(a.end, Finish)]
        assert len(ends) == count
        assert count * 0.1 < ends.count("cancelled") < count * 0.6
        # What is still on the device is the weights and the prefix cache, as before.
        assert abs((after.active - after.prefix_cache) - (before.active - before.prefix_cache)) < MB
        assert after.cache < 8 * MB
        assert after.prefix_cache <= PREFIX_BYTES
        assert worker.ask(last).ids() == right


@pytest.mark.parametrize("count", [250, pytest.param(4000, marks=pytest.mark.long)])
def test_R106_a_worker_s_memory_has_a_plateau(worker: WorkerProcess, count: int) -> None:
    with worker:
        worker.wait_ready()
        load = LoadGenerator(worker, random.Random(106), most=16, cancelled=0.1)
        footprints = []
        for _ in range(10):
            load.run(count // 10, distinct)
            footprints.append(load.idle().footprint)
        beats = worker.received_of(Beat)
        assert max(beat.memory.prefix_cache for beat in beats) <= PREFIX_BYTES
        assert beats[-1].memory.prefix_cache > PREFIX_BYTES // 2
        assert max(footprints[5:]) - max(footprints[:5]) < 8 * MB


@pytest.mark.parametrize("count", [120, pytest.param(2000, marks=pytest.mark.long)])
def test_R106_a_front_end_s_memory_has_a_plateau(tiny: Server, count: int) -> None:
    [front_end] = [p for p in tiny.processes() if "mayfly_server.front" in " ".join(p.cmdline())]
    resident = []
    for part in range(10):
        for each in range(count // 40):
            asked = {"messages": [user(f"{part} and {each}, said in few words")], "max_tokens": 3}
            together(*[partial(answer_of, tiny, CHAT, **asked)] * 3)
            with given_up(tiny, {**asked, "stream": bool(each % 2)}):
                pass
        resident.append(_resident(front_end))
    assert max(resident[5:]) - max(resident[:5]) < 4 * MB


def _resident(process: psutil.Process) -> int:
    return int(process.memory_info().rss)
