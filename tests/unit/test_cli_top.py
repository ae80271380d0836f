"""``mayfly top``: contents of a frame, and servers that cannot be reached."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from mayfly_cli.app import app
from mayfly_cli.top_frame import BAR, bar, frame, has_speeds, rate, size, span
from support.doubles.fake_node import FakeNode
from support.running_front import RunningFront

VIEW: dict[str, Any] = {
    "slot": "smol-0", "model": "smol", "state": "ready", "incarnation": 3, "pid": 4711,
    "running": 2, "rows": 8, "inferences": 40, "waiting": 1, "generated_tokens": 900,
    "phase": "decode", "load_done": 0, "load_total": 0, "footprint": 1_240_000_000, "age_s": 75.0,
    "retry_in_s": None, "detail": "", "trial": False, "tokens_per_s": 81.25,
}  # fmt: skip
LOADING = {
    **VIEW, "slot": "smol-1", "state": "loading", "incarnation": 5, "pid": 4712, "running": 0,
    "phase": "loading", "load_done": 340_000_000, "load_total": 680_000_000, "tokens_per_s": None,
    "inferences": 0, "waiting": 0,
}  # fmt: skip
RESTING = {
    **VIEW, "slot": "smol-2", "state": "backoff", "incarnation": 6, "pid": 0, "retry_in_s": 4.4,
    "detail": "segfault: killed by SIGSEGV [x]", "running": 0, "waiting": 0, "footprint": 0,
    "tokens_per_s": None,
}  # fmt: skip
AUTOPSY = {
    "id": "e-2", "slot": "smol-0", "incarnation": 2, "kind": "metal_hang", "scope": "worker",
    "first_cause": "[METAL] Command buffer execution failed: hang", "age_s": 130.0, "done": "",
}  # fmt: skip
LOSS = {**AUTOPSY, "slot": "smol-2", "incarnation": 6, "kind": "segfault", "age_s": 2.0}


def node(name: str = "mac-1", **fields: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {"node": name, "pid": 1, "silent": False, "slots": [VIEW]}
    return {**usual, "losses": [], "autopsies": [], **fields}


def picture(*nodes: dict[str, Any], leaving: bool = False) -> dict[str, Any]:
    return {"nodes": list(nodes), "leaving": leaving}


def drawn(shown: dict[str, Any], height: int = 0, width: int = 140) -> str:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(frame(shown, width, height))
    return captured.get()


def lines(shown: dict[str, Any], containing: str) -> list[str]:
    return [line for line in drawn(shown).splitlines() if containing in line]


def test_a_frame_shows_every_worker() -> None:
    shown = picture(node(slots=[VIEW, LOADING, RESTING]))
    [first] = drawn(shown).splitlines()[:1]
    assert first.split("  ", 1) == [
        "Mayfly",
        "1 of 3 ready · 2 running · 1 waiting · 81.2 tokens/s",
    ]
    [ready] = lines(shown, "4711")
    for part in ("smol-0", "● ready", "#3", "1 min", "2 of 8 rows, decode, 1 waiting", "81.2"):
        assert part in ready
    assert "1.2 GB" in ready
    [loading] = lines(shown, "4712")
    assert "◔ loading" in loading
    assert "█" * (BAR // 2) + "░" * (BAR // 2) in loading
    assert "340 MB of 680 MB" in loading
    [resting] = lines(shown, "‖ waiting")
    assert "again in 4 s" in resting
    assert lines(shown, "smol-2: segfault: killed by SIGSEGV [x]")


def test_losses_come_once_each_and_the_latest_first() -> None:
    both = [LOSS, {**AUTOPSY, "age_s": 131.0}]
    shown = picture(node(autopsies=[AUTOPSY], losses=both))
    [latest, older] = lines(shown, "†")
    assert "2 s ago" in latest
    assert "† segfault" in latest
    assert "2 min ago" in older
    assert "[METAL] Command buffer execution failed: hang" in older
    assert lines(picture(node()), "no worker was lost")


def test_in_a_low_terminal_losses_give_way() -> None:
    shown = picture(node(autopsies=[{**AUTOPSY, "incarnation": n} for n in range(8)]))
    for height in (9, 12, 24):
        assert len(drawn(shown, height).splitlines()) <= height
        assert "4711" in drawn(shown, height)


def test_a_narrow_terminal_shows_what_one_acts_upon() -> None:
    slot = {**VIEW, "slot": "SmolLM2-135M-Instruct-0"}
    shown = drawn(picture(node(slots=[slot, LOADING, RESTING], losses=[LOSS])), width=80)
    [line] = [line for line in shown.splitlines() if "4711" in line]
    for part in ("SmolLM2-135M-Instruct-0", "● ready", "#3", "2 of 8 rows", "81.2"):
        assert part in line
    assert "4712" in shown
    assert "again in 4 s" in shown
    assert "…" not in shown


def test_nodes_are_told_apart() -> None:
    shown = picture(node(), node("mac-2", slots=[], silent=False), node("mac-3", silent=True))
    assert lines(shown, "mac-1/smol-0")
    assert lines(shown, "mac-2 has no slots")
    assert lines(shown, "mac-3 has not been heard of lately")


def test_a_server_that_leaves_is_marked() -> None:
    assert lines(picture(node(), leaving=True), "the server is shutting down")


def test_speeds_are_known_when_every_ready_worker_has_one() -> None:
    assert has_speeds(picture(node(slots=[VIEW, LOADING])))
    assert not has_speeds(picture(node(slots=[VIEW, {**VIEW, "tokens_per_s": None}])))


def test_words_for_numbers() -> None:
    assert [rate(n) for n in (None, 0, 0.04, 12.34, 99.96, 1234.5)] == [
        "-", "0", "0.0", "12.3", "100.0", "1234",
    ]  # fmt: skip
    assert [span(n) for n in (-1, 0, 59.9, 60, 7199, 7200, 172_800)] == [
        "0 s", "0 s", "59 s", "1 min", "1 h", "2 h", "2 days",
    ]  # fmt: skip
    assert [size(n) for n in (0, 999, 1000, 9_940, 9_960, 999_400, 1_240_000_000, 4e15)] == [
        "0 B", "999 B", "1.0 kB", "9.9 kB", "10 kB", "999 kB", "1.2 GB", "4000 TB",
    ]  # fmt: skip
    assert [bar(n, 8).count("█") for n in (0, 0.01, 4, 8, 9)] == [0, 1, 8, 16, 16]
    assert bar(1, 0) == "░" * BAR


def run(monkeypatch: pytest.MonkeyPatch, response: httpx.Response, *options: str) -> Result:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url == "http://here:1/mayfly/events"
        return response

    def connect(url: str) -> httpx.Client:
        return httpx.Client(base_url=url, transport=httpx.MockTransport(answer))

    monkeypatch.setattr("mayfly_cli.commands.top.connect", connect)
    return CliRunner().invoke(app, ["top", "--url", "http://here:1", *options])


def stream(*pictures: dict[str, Any]) -> httpx.Response:
    text = "".join(f"data: {json.dumps(each)}\n\n" for each in pictures)
    return httpx.Response(200, text=text, headers={"content-type": "text/event-stream"})


def test_once_prints_the_first_frame_whose_speeds_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    early = picture(node(slots=[{**VIEW, "tokens_per_s": None}]))
    result = run(monkeypatch, stream(early, picture(node())), "--once")
    assert result.exit_code == 0
    assert "81.2 tokens/s" in result.stdout
    assert result.stdout.count("Mayfly") == 1


@pytest.mark.parametrize(
    ("response", "complaint"),
    [
        (httpx.Response(404), "HTTP 404"),
        (httpx.Response(401), "MAYFLY_API_KEY"),
        (httpx.Response(200, text="<html>"), "no event stream"),
        (stream({"nonsense": 1}), "not with the events of a Mayfly server"),
        (stream(), "before it sent anything"),
    ],
)
def test_once_says_why_there_is_no_frame(
    monkeypatch: pytest.MonkeyPatch, response: httpx.Response, complaint: str
) -> None:
    result = run(monkeypatch, response, "--once")
    assert result.exit_code == 1
    assert complaint in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_watching_needs_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, stream(picture(node())))
    assert result.exit_code == 1
    assert "--once" in result.stderr


def test_nobody_there_is_said() -> None:
    result = CliRunner().invoke(app, ["top", "--once", "--url", "http://127.0.0.1:9"])
    assert result.exit_code == 1
    assert "no server answers" in result.stderr


class Terminal:
    """A terminal in which a command runs."""

    def __init__(self, *command: str) -> None:
        self._master, slave = pty.openpty()
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "140", "LINES": "30"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mayfly_cli", *command],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            start_new_session=True,
        )
        os.close(slave)
        os.set_blocking(self._master, False)
        self.shown = ""

    def wait(self, condition: Callable[[str], bool]) -> None:
        """Reads on until what came since the last call fits."""
        deadline = time.monotonic() + 20
        since = len(self.shown)
        while not condition(self.shown[since:]):
            assert time.monotonic() < deadline, self.shown[since:]
            assert self.process.poll() is None, self.shown
            try:
                self.shown += os.read(self._master, 65536).decode(errors="replace")
            except BlockingIOError:
                time.sleep(0.02)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.mark.process
def test_a_terminal_follows_a_worker_through_its_death() -> None:
    """And the server through its absence, until Ctrl-C."""
    with FakeNode() as node:
        node.worker()
        with RunningFront(node.control) as front:
            terminal = Terminal("top", "--url", front.url)
            try:
                terminal.wait(lambda shown: "● ready" in shown and "no worker was lost" in shown)
                node.lose("slot-1", "crashed")
                terminal.wait(lambda shown: "‖ waiting" in shown and "† crashed" in shown)
                front.stop()
                terminal.wait(lambda shown: "not connected; trying again" in shown)
                terminal.process.send_signal(signal.SIGINT)
                assert terminal.process.wait(20) == 0
            finally:
                terminal.close()
