"""Several models in one server, from a configuration file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from support.api_client import refused, together, user
from support.models import scripted
from support.models.scripted import ScriptedReply
from support.server import Server, serving, wait_for

SLOW_S = 0.02
LONG = "and on " * 100
CLIENT = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[1] + "/v1/chat/completions", sys.argv[2].encode(),
                                 {"content-type": "application/json"})
urllib.request.urlopen(request).read()
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("pools")
    for name in ("first", "second"):
        replies = [
            ScriptedReply("[who]", f"I am the {name}."),
            ScriptedReply("[long]", f"{name} {LONG}"),
            ScriptedReply("[endless]", LONG * 10),
        ]
        scripted.build(folder / "models" / name, replies, step_s=SLOW_S)
    config = folder / "mayfly.toml"
    config.write_text(
        "trust_remote_code = true\n"
        "max_rows = 4\n"
        "[[models]]\n"
        "path = 'models/first'\n"
        "aliases = ['gpt-4o-mini', 'one']\n"
        "[[models]]\n"
        "path = 'models/second'\n"
        "name = 'org/other'\n"
        "workers = 2\n"
    )
    with serving(None, folder, "--config", str(config)) as server:
        wait_for(lambda: [s["state"] for s in server.slots()] == ["ready"] * 3, "every worker")
        yield server


def said(server: Server, model: str, text: str = "[who]", **fields: Any) -> str:
    answer = server.client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": text}], **fields
    )
    return str(answer.choices[0].message.content)


def pids(server: Server, model: str) -> list[int]:
    return [slot["pid"] for slot in server.slots() if slot["model"] == model]


def test_each_answers_under_its_own_names(server: Server) -> None:
    names = {
        "first": "first",
        "gpt-4o-mini": "first",
        "one": "first",
        "org/other": "second",
        "other": "second",
    }
    for name, who in names.items():
        assert said(server, name) == f"I am the {who}."
    [first, second] = server.client.models.list().data
    assert (first.id, second.id) == ("first", "org/other")
    assert server.client.models.retrieve("gpt-4o-mini").id == "first"
    for unknown in ("second", "models/first", "FIRST", "gpt-4o"):
        with pytest.raises(openai.NotFoundError):
            said(server, unknown)
    refused(server.post("/v1/chat/completions", {"messages": [user("hi")]}), "model")


def test_both_answer_at_once(server: Server) -> None:
    def long(model: str) -> str:
        return said(server, model, "[long]", max_tokens=20)

    first, second = together(lambda: long("first"), lambda: long("org/other"))
    assert first.startswith("first and")
    assert second.startswith("second and")


def test_a_pool_that_is_killed_leaves_the_other_alone(server: Server) -> None:
    """The other's stream goes on, on the same worker; and the killed ones come back."""
    [first] = pids(server, "first")
    victims = pids(server, "org/other")
    stream = server.client.chat.completions.create(
        model="one", messages=[{"role": "user", "content": "[long]"}], stream=True, max_tokens=150
    )
    pieces = [next(stream).choices[0].delta.content or ""]
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    pieces += [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(pieces).startswith("first and on and on")
    assert pids(server, "first") == [first]
    assert said(server, "first") == "I am the first."

    def back() -> bool:
        slots = [slot for slot in server.slots() if slot["model"] == "org/other"]
        return all(s["state"] == "ready" and s["pid"] not in victims for s in slots)

    wait_for(back, "new workers")
    assert said(server, "org/other") == "I am the second."
    assert [slot["incarnation"] for slot in server.slots() if slot["model"] == "first"] == [1]


def test_two_models_of_one_name_are_refused(server: Server, tmp_path: Path) -> None:
    models = server.folder / "models"
    config = tmp_path / "mayfly.toml"
    config.write_text(
        f"[[models]]\npath = '{models}/first'\n[[models]]\npath = '{models}/second'\nname = 'first'"
    )
    with serving(None, tmp_path, "--config", str(config), wait=False) as clashing:
        assert clashing.process.wait(30) == 1
        assert "2 models would be called 'first'" in clashing.log()


def test_R76_killed_clients_of_one_model_leave_nothing_of_it_running(server: Server) -> None:
    """Nor do they cost memory, a worker, or the health of the server."""

    def abandoned() -> None:
        client = subprocess.Popen([sys.executable, "-c", CLIENT, server.url, asked])
        try:
            wait_for(lambda: busy("org/other") == 1, "a stream")
            assert server.http.get("/health").status_code == 200
        finally:
            client.kill()
            client.wait()
        assert server.http.get("/health").status_code == 200
        wait_for(lambda: busy("org/other") == 0, "its end", 15.0)

    def busy(model: str) -> int:
        slots = [slot for slot in server.slots() if slot["model"] == model]
        return sum(slot["running"] + slot["waiting"] for slot in slots)

    def footprint() -> int:
        return sum(psutil.Process(slot["pid"]).memory_info().rss for slot in server.slots())

    asked = json.dumps({"model": "other", "messages": [user("[endless]")], "stream": True})
    wait_for(lambda: [s["state"] for s in server.slots()] == ["ready"] * 3, "every worker")
    abandoned()
    workers, memory = pids(server, "first") + pids(server, "org/other"), footprint()
    for _ in range(5):
        abandoned()
    assert pids(server, "first") + pids(server, "org/other") == workers
    assert footprint() - memory < 64 << 20
    assert said(server, "first") == "I am the first."
    assert said(server, "org/other") == "I am the second."
