"""An evaluation that never returns, and one that only takes long."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.models.scripted import ModelFault, ScriptedReply
from support.server import Server, serving, wait_for

REPLY = " ".join(f"word{number}" for number in range(12))
DECODE_S = 12.0
PREFILL_S = 4.0
STACKS_S = 3.0
"""Longer than a machine that is very busy stops the worker that has to write them."""
BUDGETS = {
    "decode_s": DECODE_S,
    "prefill_s": PREFILL_S,
    "first_factor": 1.0,
    "stacks_s": STACKS_S,
    "terminate_s": 0.3,
    "spacing_s": 0.1,
}


@pytest.fixture
def server(scripted_model: Callable[..., Path], tmp_path: Path) -> Iterator[Server]:
    """A server with one row at a time, and six milliseconds for each token of a prompt."""
    spin = ModelFault(3, "spin_gil_released", times=1)
    model = scripted_model(
        [ScriptedReply("[spin]", REPLY, [spin])], prefill_token_s=0.006, default=REPLY
    )
    options = ("--trust-remote-code", "--max-rows", "1")
    with serving(model, tmp_path, *options, budgets=BUDGETS) as server:
        yield server


def test_a_wedged_worker_is_replaced_and_everything_on_it_ends(server: Server) -> None:
    before = server.slot()
    answers: dict[str, Any] = {}

    def ask(name: str, text: str) -> threading.Thread:
        def run() -> None:
            answers[name] = server.chat(text, max_tokens=None).choices[0].message.content

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    running = ask("running", "[spin]")
    wait_for(lambda: server.slot()["running"] == 1, "the first request to run")
    waiting = ask("waiting", "and I wait")
    wait_for(lambda: server.slot()["waiting"] >= 1, "the second request to wait")
    gone = server.client.with_options(timeout=1.0)
    with pytest.raises(Exception, match="timed out"):
        gone.chat.completions.create(
            model=server.model, messages=[{"role": "user", "content": "I go away"}]
        )
    began = time.monotonic()
    successor = wait_for(
        lambda: next(
            (
                slot
                for slot in server.slots()
                if slot["state"] == "ready" and slot["incarnation"] > before["incarnation"]
            ),
            None,
        ),
        "a successor",
    )
    assert time.monotonic() - began < 2 * DECODE_S + STACKS_S
    assert successor["pid"] != before["pid"]
    for thread in (running, waiting):
        thread.join(30)
    assert answers == {"running": REPLY, "waiting": REPLY}
    wait_for(
        lambda: (server.slot()["running"], server.slot()["waiting"]) == (0, 0),
        "no phantom left",
        10,
    )
    [autopsy] = server.autopsies()
    assert autopsy["kind"] == "wedged"
    assert "no progress in decode (1 running" in autopsy["first_cause"]["text"]
    assert any("_spin_releasing_the_gil" in line for line in autopsy["stderr"])
    assert autopsy["breadcrumb"]["phase"] == "decode"
    assert len(autopsy["breadcrumb"]["requests"]) == 1


def test_a_server_with_a_wedged_worker_stops(server: Server) -> None:
    """The reaper's time limits are longer than the operator waits."""
    stream = server.client.chat.completions.create(
        model=server.model, messages=[{"role": "user", "content": "[spin]"}], stream=True
    )
    next(iter(stream))
    began = time.monotonic()
    assert server.stop(signal.SIGTERM) == 0
    assert time.monotonic() - began < 20
    stream.close()


def test_a_prompt_that_takes_long_is_left_alone(server: Server) -> None:
    before = server.slot()
    began = time.monotonic()
    answer = server.chat("tell me more of it " * 280, max_tokens=2)
    took_s = time.monotonic() - began
    assert took_s > 2 * PREFILL_S
    assert answer.usage.prompt_tokens > 1500
    after = server.slot()
    assert (after["incarnation"], after["pid"]) == (before["incarnation"], before["pid"])
