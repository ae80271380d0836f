"""``mayfly status`` against answers of a server, and of other programs."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from mayfly_cli.app import app
from mayfly_cli.commands.status import table
from mayfly_protocol.capabilities import Capabilities, shown
from support.server import free_port

SLOT = {
    "slot": "a-model-with-quite-a-long-name-in-front-of-its-number-0",
    "model": "smol [4-bit]",
    "state": "ready",
    "incarnation": 3,
    "pid": 4711,
    "running": 2,
    "inferences": 40,
}
STATUS: dict[str, Any] = {
    "nodes": [{"node": "mac-1", "pid": 99, "slots": [SLOT, {**SLOT, "slot": "smol-1", "pid": 0}]}]
}


def ask(monkeypatch: pytest.MonkeyPatch, response: httpx.Response, *options: str) -> Result:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url == "http://here:1/mayfly/status"
        return response

    def connect(url: str) -> httpx.Client:
        return httpx.Client(base_url=url, transport=httpx.MockTransport(answer))

    monkeypatch.setattr("mayfly_cli.commands.status.connect", connect)
    return CliRunner().invoke(app, ["status", "--url", "http://here:1", *options])


def test_json_is_the_servers_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    result = ask(monkeypatch, httpx.Response(200, json=STATUS), "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == STATUS


def test_a_table_has_a_row_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    result = ask(monkeypatch, httpx.Response(200, json=STATUS))
    assert result.exit_code == 0
    header, first, second = result.stdout.splitlines()  # not cut to a terminal's width
    assert header.split() == [
        "NODE", "SLOT", "MODEL", "STATE", "INCARNATION", "PID", "RUNNING", "INFERENCES",
    ]  # fmt: skip
    assert first.split() == [
        "mac-1",
        SLOT["slot"],
        "smol",
        "[4-bit]",
        "ready",
        "3",
        "4711",
        "2",
        "40",
    ]
    assert second.split()[6] == "-"  # no process, no pid


def test_capabilities_of_each_model_are_given_once(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Capabilities(context=4096, context_from="the option context", rows=8)
    alone = Capabilities(rows=1, one_row_because="mlx-lm cannot batch caches of the class Odd")
    slots = [
        {**SLOT, "slot": "a", "capabilities": shown(one)},
        {**SLOT, "slot": "b", "capabilities": {**shown(one), "of a later version": 1}},
        {**SLOT, "slot": "c", "model": "odd", "capabilities": shown(alone)},
        {**SLOT, "slot": "d", "model": "none yet", "capabilities": None},
    ]
    answer = {"nodes": [{"node": "mac-1", "pid": 99, "slots": slots}]}
    result = ask(monkeypatch, httpx.Response(200, json=answer))
    lines = result.stdout.splitlines()[5:]
    assert [line for line in lines if not line.startswith("  ")] == ["", "smol [4-bit]", "", "odd"]
    assert "  context: 4,096 tokens (the option context)" in lines
    assert f"  sequences: one at a time: {alone.one_row_because}" in lines


def test_a_node_without_slots_is_shown() -> None:
    console = Console(width=100)
    with console.capture() as shown:
        console.print(table([{"node": "mac-2", "pid": 1, "slots": []}]))
    assert "mac-2" in shown.get()
    assert "no slots" in shown.get()


def test_a_silent_node_is_marked() -> None:
    console = Console(width=120)
    with console.capture() as shown:
        console.print(table([{"node": "mac-1", "pid": 9, "silent": True, "slots": [SLOT]}]))
    assert "mac-1 (silent)" in shown.get()


@pytest.mark.parametrize(
    ("response", "complaint"),
    [
        (httpx.Response(404), "HTTP 404"),
        (httpx.Response(200, text="<html>"), "not JSON"),
        (httpx.Response(200, json=[1]), "not as a Mayfly server"),
    ],
)
def test_another_server_is_recognised(
    monkeypatch: pytest.MonkeyPatch, response: httpx.Response, complaint: str
) -> None:
    result = ask(monkeypatch, response)
    assert result.exit_code == 1
    assert complaint in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_bad_address_is_wrong_usage() -> None:
    result = CliRunner().invoke(app, ["status", "--url", "http://[::1"])
    assert result.exit_code == 2


def test_an_address_without_a_scheme_is_explained() -> None:
    result = CliRunner().invoke(app, ["status", "--url", f"localhost:{free_port()}"])
    assert result.exit_code == 1
    assert "http://" in result.stderr
