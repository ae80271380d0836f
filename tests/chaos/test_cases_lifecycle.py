"""Lost workers in cases that other servers were reported for, with real processes.
docs/reported-faults.md lists the ids in test names."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from support.chaos_client import StreamingClient
from support.models.scripted import ModelFault, ScriptedReply
from support.server import Server, serving, wait_for

BUDGETS = {"retry_s": 0.1, "retry_max_s": 0.5, "spacing_s": 0.1}
TALE = " ".join(f"word{number}" for number in range(60))


@pytest.fixture(scope="module")
def server(
    scripted_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server with one worker, and a fault that happens once."""
    boom = ScriptedReply("[boom]", TALE, [ModelFault(5, "raise", "somebody's bug", times=1)])
    model = scripted_model(
        [boom, ScriptedReply("[tale]", TALE), ScriptedReply("[long]", "on " * 900)], step_s=0.005
    )
    folder = tmp_path_factory.mktemp("lifecycle")
    with serving(model, folder, "--trust-remote-code", budgets=BUDGETS) as server:
        yield server


def lost(server: Server) -> int:
    """The only worker, killed; its process id."""
    pid = int(server.slot()["pid"])
    os.kill(pid, signal.SIGKILL)
    return pid


def test_R79_requests_outwait_a_worker_that_dies_while_it_loads(
    scripted_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = scripted_model(
        [ScriptedReply("[tale]", TALE)],
        load_faults=[ModelFault("load", "kill", times=2)],
        step_s=0.005,
    )
    with serving(model, tmp_path, "--trust-remote-code", wait=False, budgets=BUDGETS) as server:
        wait_for(lambda: _answers(server), "the front end")
        streamed = StreamingClient(server, "[tale]")
        whole = server.chat("[tale]", max_tokens=None)
        assert whole.choices[0].message.content == TALE
        assert streamed.result().text == TALE
        assert [autopsy["kind"] for autopsy in server.autopsies()] == ["killed"] * 2


@pytest.mark.parametrize("broken", ["weights", pytest.param("folder", marks=pytest.mark.long)])
def test_R79_a_model_that_cannot_load_any_more_ends_what_waits_for_it(
    tiny_model: Path, tmp_path: Path, broken: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    with serving(model, tmp_path, budgets=BUDGETS) as server:
        streamed = StreamingClient(server, "go", max_tokens=1900, temperature=0)
        wait_for(lambda: len(streamed.answer.at) > 5, "a stream")
        if broken == "weights":
            (model / "model.safetensors").write_bytes(b"not weights")
        else:
            shutil.rmtree(model)
        lost(server)
        began = time.monotonic()
        error = streamed.error
        assert time.monotonic() - began < 30
        assert isinstance(error, openai.APIError)
        assert error.code == "model_failed"
        wait_for(lambda: server.slot()["state"] == "failed", "the slot's end")
        began = time.monotonic()
        with pytest.raises(openai.InternalServerError) as caught:
            server.chat("go")
        assert caught.value.status_code == 503
        assert time.monotonic() - began < 10, "nobody waits for a worker any more"
        health = server.http.get("/health")
        assert health.status_code == 503
        assert "cannot start" in health.json()["reason"]


def test_R81_the_engines_end_is_not_the_servers(server: Server) -> None:
    waiting = [StreamingClient(server, "[boom]"), StreamingClient(server, "[tale]")]
    assert [each.result().text for each in waiting] == [TALE, TALE]
    assert [autopsy["kind"] for autopsy in server.autopsies()] == ["unknown"]
    assert server.http.get("/health").status_code == 200
    assert server.chat("[tale]", max_tokens=None).choices[0].message.content == TALE


@pytest.mark.parametrize("cycles", [2, pytest.param(5, marks=pytest.mark.long)])
def test_R108_dropped_streams_and_killed_workers_leave_no_orphans(
    server: Server, cycles: int
) -> None:
    def start() -> openai.Stream[Any]:
        messages: Any = [{"role": "user", "content": "[long]"}]
        return server.client.chat.completions.create(
            model=server.model, messages=messages, stream=True
        )

    for _ in range(cycles):
        streams = [start() for _ in range(30)]
        for stream in streams[:20]:
            stream.close()
        before = server.slot()["incarnation"]
        lost(server)
        for stream in streams[20:]:
            stream.close()
        assert server.chat("[tale]", max_tokens=None).choices[0].message.content == TALE
        wait_for(lambda before=before: server.slot()["incarnation"] > before, "a new worker")
        wait_for(lambda: server.slot()["running"] + server.slot()["waiting"] == 0, "quiet")
    began = time.monotonic()
    assert server.chat("[tale]", max_tokens=None).choices[0].message.content == TALE
    assert time.monotonic() - began < 15


def _answers(server: Server) -> bool:
    try:
        return server.http.get("/livez").status_code == 200
    except Exception:
        return False
