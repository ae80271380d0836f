"""A server's processes: replaced when they die, gone when it stops."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import openai
import pytest

from support.models.scripted import ScriptedReply
from support.processes import alive
from support.server import Server, serving, wait_for


def next_incarnation(server: Server, before: int) -> dict[str, object]:
    def ready() -> dict[str, object] | None:
        slot = server.slot()
        return slot if slot["incarnation"] > before and slot["state"] == "ready" else None

    return wait_for(ready, "a new incarnation")


def test_a_killed_worker_is_replaced_and_nothing_else(tiny_model: Path, tmp_path: Path) -> None:
    with serving(tiny_model, tmp_path) as server:
        answer = server.chat().choices[0].message.content
        node, slot = server.node(), server.slot()
        front_ends = {
            p.pid for p in server.processes() if "mayfly_server.front" in " ".join(p.cmdline())
        }
        os.kill(slot["pid"], signal.SIGKILL)
        successor = next_incarnation(server, slot["incarnation"])
        assert successor["pid"] != slot["pid"]
        assert server.chat().choices[0].message.content == answer
        assert server.node()["pid"] == node["pid"]
        assert {
            p.pid for p in server.processes() if "mayfly_server.front" in " ".join(p.cmdline())
        } == front_ends


def test_S19_only_the_user_reads_a_nodes_state_whatever_the_umask(
    tiny_model: Path, tmp_path: Path
) -> None:
    before = os.umask(0)
    try:
        server = Server(tiny_model, tmp_path)
    finally:
        os.umask(before)
    with contextlib.closing(server):
        server.wait_ready()
        server.chat()
        slot = server.slot()
        os.kill(slot["pid"], signal.SIGKILL)
        next_incarnation(server, slot["incarnation"])
        wait_for(server.autopsies, "a crash record")
        state = server.state_dir
        found = {path: path.stat().st_mode & 0o777 for path in (state, *state.rglob("*"))}
    names = {path.name for path in found}
    assert {"autopsies.jsonl", "lock", "incarnation", "workers.json", "stderr"} <= names
    assert {path: mode for path, mode in found.items() if mode & 0o077} == {}


def test_a_request_survives_the_death_of_its_worker(
    scripted_model: Callable[..., Path], tmp_path: Path
) -> None:
    reply = " ".join(f"word{i}" for i in range(40))
    model = scripted_model([ScriptedReply("go", reply)], step_s=0.02)
    with serving(model, tmp_path, "--trust-remote-code") as server:
        stream = server.client.chat.completions.create(
            model=server.model,
            messages=[{"role": "user", "content": "go"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        undisturbed = server.chat("go", max_tokens=None)
        text, usage = "", None
        for number, chunk in enumerate(stream):
            if number == 10:
                os.kill(server.slot()["pid"], signal.SIGKILL)
            text += "".join(c.delta.content or "" for c in chunk.choices)
            usage = chunk.usage or usage
        assert text == reply == undisturbed.choices[0].message.content
        assert usage == undisturbed.usage


STOPS = [
    ("starting", signal.SIGINT),
    ("starting", signal.SIGTERM),
    ("starting", signal.SIGHUP),
    ("idle", signal.SIGINT),
    ("mid-stream", signal.SIGTERM),
]
MORE_STOPS = [
    ("idle", signal.SIGTERM),
    ("idle", signal.SIGHUP),
    ("mid-stream", signal.SIGINT),
    ("mid-stream", signal.SIGHUP),
]


@pytest.mark.parametrize(
    ("when", "how"), [*STOPS, *(pytest.param(*stop, marks=pytest.mark.long) for stop in MORE_STOPS)]
)
def test_R100_R101_stopping_leaves_nothing(
    scripted_model: Callable[..., Path], tmp_path: Path, when: str, how: signal.Signals
) -> None:
    model = scripted_model([ScriptedReply("go", "word " * 2000)], step_s=0.01)
    with serving(model, tmp_path, "--trust-remote-code", wait=when != "starting") as server:
        reader, failures = None, list[Exception]()
        if when == "starting":
            wait_for(lambda: len(server.processes()) > 1, "child processes")
        if when == "mid-stream":
            stream = server.client.chat.completions.create(
                model=server.model, messages=[{"role": "user", "content": "go"}], stream=True
            )
            next(iter(stream))
            reader = threading.Thread(target=_drain, args=(stream, failures))
            reader.start()
        assert server.stop(how) == 0
        if reader:
            reader.join(10)
            assert [str(failure) for failure in failures] == ["The server is shutting down."]
        wait_for(lambda: not server.processes(), "every process to end", 15)
        assert "Traceback" not in server.log()
        left = [p for p in Path(f"/tmp/mayfly-{os.getuid()}").glob("*/*.ipc") if _ours(p, server)]
        assert left == []


def _drain(stream: Iterable[object], failures: list[Exception]) -> None:
    try:
        for _ in stream:
            pass
    except openai.APIError as error:
        failures.append(error)


def _ours(path: Path, server: Server) -> bool:
    digest = hashlib.sha256(str(server.state_dir.resolve()).encode()).hexdigest()[:8]
    return path.parent.name == digest


def test_a_killed_server_leaves_nothing_running(tiny_model: Path, tmp_path: Path) -> None:
    with serving(tiny_model, tmp_path) as server:
        started = server.processes()
        assert len(started) >= 3  # reaper, front end, worker
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
        wait_for(lambda: not any(alive(p) for p in started), "every process to end", 15)


def test_a_taken_port_is_told_before_anything_loads(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    with serving(tiny_model, tmp_path / "one") as server:
        (tmp_path / "two").mkdir()
        second = Server(tiny_model, tmp_path / "two", "--port", str(server.port))
        try:
            assert second.process.wait(30) == 1
            assert str(server.port) in second.log()
            assert "Traceback" not in second.log()
        finally:
            second.close()
