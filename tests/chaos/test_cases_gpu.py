"""GPU faults that other servers were reported for, as far as a CPU can simulate them.
docs/reported-faults.md lists the ids in test names."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

from mayfly_protocol.serving import Ping
from support.chaos_client import QUICK_RETRIES, StreamingClient
from support.models.scripted import ModelFault, ScriptedReply
from support.server import Server, serving, wait_for
from support.worker import WorkerProcess, generation

BUDGETS = {
    **QUICK_RETRIES,
    "batch_faults": 1000,
    "verdict_wait_s": 10.0,  # a reaper that the machine stops for a second is heard all the same
}
WORDS = [f"word{number}" for number in range(60)]
TALE = " ".join(WORDS)
EPIC = " ".join(f"word{number}" for number in range(140))
HANDLES = "[metal::malloc] Resource limit (499000) exceeded."
GRAPH = "cudaGraphAddKernelNode(&node, graph_, nullptr, 0, &params) failed: invalid argument"

PLAYS = [
    *(ScriptedReply(f"[abort {n}]", TALE, [ModelFault(9, "abort", times=1)]) for n in range(6)),
    ScriptedReply("[poison]", TALE, [ModelFault("prefill", "abort")]),
    ScriptedReply("[handles]", TALE, [ModelFault(50, "raise", HANDLES, times=1)]),
    ScriptedReply("[graph]", TALE, [ModelFault(20, "raise", GRAPH)]),
    ScriptedReply("[tale]", TALE),
    ScriptedReply("[epic]", EPIC),
]
OPTIONS = ("--trust-remote-code", "--workers", "2")
TRIES = 3


@pytest.fixture(scope="module")
def server(
    scripted_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    model = scripted_model(PLAYS, step_s=0.01)
    folder = tmp_path_factory.mktemp("gpu")
    with serving(model, folder, *OPTIONS, budgets=BUDGETS) as server:
        yield server


@pytest.fixture(scope="module")
def unscathed(
    scripted_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server that loses workers to requests alone: no machine is blamed for losses that have
    nothing in common."""
    model = scripted_model(PLAYS, step_s=0.01)
    folder = tmp_path_factory.mktemp("unscathed")
    with serving(model, folder, *OPTIONS, budgets=BUDGETS) as server:
        yield server


def whole(server: Server) -> None:
    """Waits until the front end can send requests to every worker, which is a moment after the
    worker is ready."""
    wait_for(lambda: all(slot["state"] == "ready" for slot in server.slots()), "every worker")
    workers = f'mayfly_workers_ready{{model="{server.model}"}} {float(len(server.slots()))}'
    wait_for(lambda: workers in server.http.get("/metrics").text, "a link to every worker")


def kinds(server: Server) -> list[str]:
    return [autopsy["kind"] for autopsy in server.autopsies()]


def assert_lost(server: Server, before: int, lost: list[str]) -> None:
    """Checks the autopsies behind ``before`` earlier ones: one is written when a process is
    gone."""
    wait_for(lambda: len(kinds(server)) >= before + len(lost), "a record of every loss")
    assert kinds(server)[before:] == lost


@pytest.mark.parametrize("numbers", [(4, 5), pytest.param(range(4), marks=pytest.mark.long)])
def test_R110_aborts_in_a_row_and_the_server_stays(server: Server, numbers: Sequence[int]) -> None:
    before = len(kinds(server))
    front_end = server.node()["pid"]
    for number in numbers:
        assert StreamingClient(server, f"[abort {number}]").result().text == TALE
    assert_lost(server, before, ["aborted"] * len(numbers))
    whole(server)
    assert server.http.get("/readyz").status_code == 200
    assert server.node()["pid"] == front_end
    assert StreamingClient(server, "[tale]").result().text == TALE


def test_R111_a_prompt_that_aborts_its_prefill_is_not_retried_for_ever(unscathed: Server) -> None:
    server = unscathed
    whole(server)
    before = len(kinds(server))
    first = StreamingClient(server, "[poison]").error
    assert isinstance(first, openai.APIError)
    assert first.code == "aborted"
    again = StreamingClient(server, "[poison]").error
    assert isinstance(again, openai.InternalServerError)
    assert again.code == "aborted"
    assert again.response.headers["x-should-retry"] == "false"
    assert_lost(server, before, ["aborted"] * 3)
    whole(server)
    assert StreamingClient(server, "[tale]").result().text == TALE


def test_R112_streams_of_the_other_worker_do_not_notice(server: Server) -> None:
    """A busy machine may stop any stream for a moment, but not each time."""
    assert any(noticed_by_its_own_alone(server) for _ in range(TRIES))


def noticed_by_its_own_alone(server: Server) -> bool:
    """Kills one of two workers with four streams: whether those of the other one went on. False,
    too, where the four were never seen together."""
    whole(server)
    asked = [StreamingClient(server, "[epic]", seed=number) for number in range(4)]
    busy = together(server, asked)
    if busy:
        assert len(busy) == 2, "they share the load"
        os.kill(busy[0]["pid"], signal.SIGABRT)
    answers = [each.result() for each in asked]
    assert [answer.text for answer in answers] == [EPIC] * 4
    gaps = sorted(answer.gap_s for answer in answers)
    spared = 4 - busy[0]["running"] if busy else 0
    return spared > 0 and all(gap < 0.5 for gap in gaps[:spared])


def together(server: Server, asked: Sequence[StreamingClient]) -> list[dict[str, Any]]:
    """The slots in which all of them run; none where one of them has ended before."""
    while all(each.is_alive() for each in asked):
        busy = [slot for slot in server.slots() if slot["running"]]
        if sum(slot["running"] for slot in busy) == len(asked):
            return busy
        time.sleep(0.02)
    return []


def test_R113_a_worker_without_handles_leaves_and_nobody_is_cut_short(server: Server) -> None:
    whole(server)
    before = len(kinds(server))
    others = [StreamingClient(server, "[tale]", prompt_cache_key="together") for _ in range(2)]
    struck = StreamingClient(server, "[handles]", prompt_cache_key="together")
    assert [each.result().text for each in (struck, *others)] == [TALE] * 3
    assert kinds(server)[before:] == [], "that is no loss"
    assert "metal_resource_limit" in server.log()
    whole(server)
    assert server.http.get("/health").status_code == 200


@pytest.mark.long
def test_R113_ten_thousand_tokens_leave_nothing_behind(
    scripted_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = scripted_model([ScriptedReply("[tale]", TALE)], context=12_000)
    with WorkerProcess(model, tmp_path, trust_remote_code=True, prefix_cache=1 << 20) as worker:
        worker.wait_ready()
        worker.ask(generation("warm up", max_tokens=64))
        before = worker.memory()
        answer = worker.submit(generation("no marker, no end", max_tokens=10_000))
        for drawn in range(100, 10_001, 100):
            worker.wait(lambda drawn=drawn: len(answer.messages) > drawn, f"{drawn} tokens")
            worker.send(Ping(drawn))  # a front end that is silent for long is taken for dead
        worker.wait(lambda: answer.end, "the end of the answer")
        assert len(answer.ids()) == 10_000
        worker.ask(generation("after that", max_tokens=64))
        after = worker.memory()
        assert after.active - before.active <= 2 << 20, "what the cache keeps, and no more"


def test_R114_ever_longer_prompts_do_not_fill_the_memory(tiny_model: Path, tmp_path: Path) -> None:
    """The cache of prompts is bounded, and so is what one request may need."""
    room = 1 << 20
    with WorkerProcess(tiny_model, tmp_path, prefix_cache=room, kv_budget=8 << 20) as worker:
        worker.wait_ready()
        for words in range(10, 500, 45):
            prompt = f"{words} " + "stone " * words
            answer = worker.ask(generation(prompt, max_tokens=4))
            assert len(answer.ids()) == 4
        worker.wait(lambda: worker.memory().prefix_cache > 0, "a beat")
        assert worker.memory().prefix_cache <= room
        refused = worker.ask(generation("stone " * 5000, max_tokens=4))
        assert refused.end is not None
        assert getattr(refused.end, "reason", "") == "invalid"
        assert worker.process.poll() is None


@pytest.mark.long
def test_R116_a_kernel_that_cannot_be_launched_is_one_requests_error(unscathed: Server) -> None:
    server = unscathed
    whole(server)
    before = len(kinds(server))
    beside = StreamingClient(server, "[tale]", prompt_cache_key="together")
    asking = StreamingClient(server, "[graph]", prompt_cache_key="together")
    assert isinstance(asking.error, openai.APIError)
    assert asking.error.code == "cuda_graph_launch"
    assert TALE.startswith(asking.answer.text)
    assert beside.result().text == TALE
    assert_lost(server, before, ["cuda_graph_launch"] * 3)
    whole(server)
    assert StreamingClient(server, "[tale]").result().text == TALE


def test_R117_prompts_of_many_lengths_through_one_worker(tiny_model: Path, tmp_path: Path) -> None:
    """Answers do not depend on what was run before."""
    lengths = [1, 2, 3, 7, 8, 9, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 600]
    prompts = ["stone " * length for length in lengths]

    with WorkerProcess(tiny_model, tmp_path) as worker:
        worker.wait_ready()

        def answers(order: list[str]) -> dict[str, list[int]]:
            return {p: worker.ask(generation(p, max_tokens=4)).ids() for p in order}

        assert answers(prompts) == answers(prompts[::-1])
