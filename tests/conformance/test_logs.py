"""Log lines of a whole server: each names its subject, and none holds a prompt or an answer."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mayfly_protocol.serving import Failed
from mayfly_protocol.settings import LogSettings
from support.server import Server, serving, wait_for
from support.worker import WorkerProcess, generation

SECRET = "xyzzy-plover-plugh"
"""In everything that is asked here."""
NAMES = {"slot", "incarnation"}


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("logs")
    options = ("--log-format", "json", "--log-level", "debug", "--workers", "2")
    with serving(tiny_model, folder, *options) as server:
        yield server


def log_lines(server: Server) -> list[dict[str, Any]]:
    return [json.loads(line) for line in server.log().splitlines()]


def everything(server: Server) -> str:
    """Returns all that the server has written anywhere, workers' stderr included."""
    files = [path for path in server.state_dir.rglob("*") if path.is_file()]
    return server.log() + "".join(path.read_text(errors="replace") for path in files)


def ask_for_everything(server: Server) -> list[httpx.Response]:
    """Good requests and bad ones of every kind, with the secret wherever text may stand."""
    chat = {"model": server.model, "max_tokens": 4}
    message = {"role": "user", "content": SECRET}
    tool = {"type": "function", "function": {"name": "f", "description": SECRET}}
    schema = {"type": "object", "properties": {SECRET: {"const": SECRET}}, "$ref": SECRET}
    bodies: list[tuple[str, Any]] = [
        ("/v1/chat/completions", {**chat, "messages": [message]}),
        ("/v1/chat/completions", {**chat, "messages": [message], "stream": True}),
        ("/v1/chat/completions", {**chat, "messages": [message], "stop": [SECRET]}),
        ("/v1/chat/completions", {**chat, "messages": [message], "user": SECRET}),
        ("/v1/chat/completions", {**chat, "messages": [message], "tools": [tool]}),
        ("/v1/chat/completions", {**chat, "messages": [{"role": SECRET, "content": SECRET}]}),
        ("/v1/chat/completions", {**chat, "messages": SECRET}),
        ("/v1/chat/completions", {**chat, "model": SECRET, "messages": [message]}),
        ("/v1/chat/completions", {**chat, SECRET: SECRET, "messages": [message]}),
        ("/v1/chat/completions", {**chat, "messages": [{**message, "content": SECRET * 9000}]}),
        (
            "/v1/chat/completions",
            {
                **chat,
                "messages": [message],
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": schema},
                },
            },
        ),
        ("/v1/completions", {**chat, "prompt": SECRET}),
        ("/v1/completions", {**chat, "prompt": [SECRET, SECRET], "echo": True}),
        ("/v1/completions", {**chat, "prompt": [10**9]}),
        ("/v1/messages", {**chat, "messages": [message], "system": SECRET}),
        ("/v1/responses", {"model": server.model, "input": SECRET, "max_output_tokens": 4}),
        ("/tokenize", {"model": server.model, "prompt": SECRET}),
    ]
    answers = [server.post(path, body) for path, body in bodies]
    raw = f'{{"messages": "{SECRET}"'.encode()
    answers.append(
        server.http.post(
            "/v1/chat/completions", content=raw, headers={"content-type": "application/json"}
        )
    )
    return answers


def lose_a_worker_in_mid_stream(server: Server) -> None:
    """Kills a worker during a request that holds the secret."""
    texts: list[str] = []

    def listen() -> None:
        answer = server.post(
            "/v1/completions",
            {"model": server.model, "prompt": SECRET, "max_tokens": 1500, "temperature": 0},
        )
        texts.append(answer.json()["choices"][0]["text"])

    thread = threading.Thread(target=listen)
    thread.start()
    busy: dict[str, Any] = wait_for(
        lambda: next((slot for slot in server.slots() if slot["running"]), None), "a busy worker"
    )
    with contextlib.suppress(ProcessLookupError):
        os.kill(busy["pid"], signal.SIGSEGV)
    thread.join()
    assert texts


def test_nothing_that_is_asked_is_logged(server: Server) -> None:
    statuses = {answer.status_code for answer in ask_for_everything(server)}
    assert {200, 400, 404} <= statuses
    lose_a_worker_in_mid_stream(server)
    wait_for(server.autopsies, "an autopsy")
    text = everything(server)
    assert SECRET not in text
    answer = server.chat(SECRET, max_tokens=200).choices[0].message.content
    assert len(answer) > 20 and answer not in everything(server)


def test_every_line_is_an_object_that_says_what_it_is_about(server: Server) -> None:
    lose_a_worker_in_mid_stream(server)
    wait_for(lambda: any("was lost" in line["event"] for line in log_lines(server)), "the loss")
    lines = log_lines(server)
    assert all({"event", "level", "logger", "timestamp"} <= line.keys() for line in lines)
    lost = [line for line in lines if "was lost" in line["event"]]
    assert all(line.keys() >= NAMES and line["level"] == "warning" for line in lost)
    moved = [line for line in lines if line["event"] == "retrying request on another worker"]
    assert moved and all({"request_id", "rid", *NAMES} <= line.keys() for line in moved)
    changed = [line for line in lines if line["event"] == "slot changed"]
    assert {"loading", "ready", "gone"} <= {line["state"] for line in changed}
    assert all(line.keys() >= NAMES for line in changed)


def test_a_request_is_known_by_its_clients_id(server: Server) -> None:
    """The client's id is in the answer's headers and in the log."""

    def struck() -> bool:
        answers: list[httpx.Response] = []
        body = {"model": server.model, "prompt": "x", "max_tokens": 1500, "temperature": 0}
        headers = {"x-request-id": "my-own-id"}
        thread = threading.Thread(
            target=lambda: answers.append(
                server.http.post("/v1/completions", json=body, headers=headers)
            )
        )
        thread.start()
        slot = wait_for(
            lambda: next((s for s in server.slots() if s["running"]), None), "a busy worker"
        )
        with contextlib.suppress(ProcessLookupError):
            os.kill(slot["pid"], signal.SIGKILL)
        thread.join()
        assert answers[0].headers["x-request-id"] == "my-own-id"
        return any(line.get("request_id") == "my-own-id" for line in log_lines(server))

    wait_for(struck, "a request that went on elsewhere")


BROKEN = """
from mayfly_worker import prepare

def broken(prompt, *others):
    raise KeyError(f"cannot tokenize {prompt}")

prepare.render = broken
"""
"""Code that is added to a model's own."""


@pytest.mark.parametrize("wanted", [False, True])
def test_a_worker_that_cannot_prepare_a_request_says_so_without_it(
    scripted_model: Callable[..., Path], tmp_path: Path, wanted: bool
) -> None:
    model = scripted_model([])
    with (model / "model.py").open("a") as file:
        file.write(BROKEN)
    logs = LogSettings("json", "debug", prompts=wanted)
    with WorkerProcess(model, tmp_path, trust_remote_code=True, logs=logs) as worker:
        worker.wait_ready()
        answer = worker.ask(generation(SECRET))
        assert isinstance(answer.end, Failed)
        assert (SECRET in worker.log()) == wanted
        [line] = [json.loads(line) for line in worker.log().splitlines()]
    assert line["event"] == "a request could not be prepared for the engine: it ends with an error"
    assert (line["slot"], line["incarnation"], line["rid"]) == ("test/0", 1, answer.rid)
    assert "in broken" in line["exception"] and "KeyError" in line["exception"]
