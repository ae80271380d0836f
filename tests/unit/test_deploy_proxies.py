"""haproxy and Caddy, with the configurations of ``deploy/``, in front of real front ends."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from mayfly_server.settings import FrontSettings
from support.doubles.fake_node import WORDS, FakeNode, answer_then, answer_words
from support.running_front import PATIENCE_S, RunningFront

DEPLOY = Path(__file__).parents[2] / "deploy"
HELLO = {"messages": [{"role": "user", "content": "hi"}], "stream": True}


def haproxy(folder: Path, text: str) -> tuple[list[str], list[str]]:
    path = folder / "haproxy.cfg"
    path.write_text(text)
    return ["haproxy", "-c", "-f", str(path)], ["haproxy", "-db", "-f", str(path)]


def caddy(folder: Path, text: str) -> tuple[list[str], list[str]]:
    path = folder / "Caddyfile"
    path.write_text("{\n\tadmin off\n}\n" + text)
    of = ["--adapter", "caddyfile", "--config", str(path)]
    return ["caddy", "validate", *of], ["caddy", "run", *of]


PROXIES = {"haproxy.cfg": haproxy, "Caddyfile": caddy}


@contextmanager
def proxied(name: str, folder: Path, ports: list[int]) -> Iterator[httpx.Client]:
    """A client of a proxy before front ends on these ports; 8001 and so on in its configuration."""
    prepare: Callable[[Path, str], tuple[list[str], list[str]]] = PROXIES[name]
    if shutil.which(prepare.__name__) is None:
        pytest.skip(f"{prepare.__name__} is missing")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    places = dict(zip((8000, 8001, 8002, 8003), (port, *ports), strict=True))
    text = re.sub(
        r"(127\.0\.0\.1):(\d+)",
        lambda found: f"{found[1]}:{places[int(found[2])]}",
        (DEPLOY / name).read_text(),
    )
    # mlx_lm lowers the limit on open files of whatever imports it, which may be this process.
    text = text.replace("maxconn 4000", "maxconn 400")
    # A front end that the machine keeps waiting for a moment is not down.
    text = text.replace(
        "    timeout connect 5s\n", "    timeout connect 5s\n    timeout check 10s\n"
    )
    text = text.replace("health_timeout 2s", "health_timeout 10s")
    check, serve = prepare(folder, text)
    environment = {**os.environ, "HOME": str(folder), "XDG_CONFIG_HOME": "", "XDG_DATA_HOME": ""}
    checked = subprocess.run(
        check, capture_output=True, text=True, check=False, env=environment, cwd=folder
    )
    assert checked.returncode == 0, checked.stderr
    with (folder / "proxy.log").open("w") as log:
        process = subprocess.Popen(serve, stdout=log, stderr=log, env=environment, cwd=folder)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as client:
                RunningFront.wait(lambda: answers(client))
                yield client
        finally:
            process.kill()
            process.wait()


def answers(client: httpx.Client) -> bool:
    try:
        return client.get("/livez").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.process
@pytest.mark.parametrize("name", PROXIES)
def test_streams_pass_as_they_come_and_nobody_is_refused(name: str, tmp_path: Path) -> None:
    gate = threading.Event()

    def rest(submit):  # type: ignore[no-untyped-def]
        yield gate
        yield from list(answer_words()(submit))[2:]

    def not_at_once(submit):  # type: ignore[no-untyped-def]
        # Go's proxies cut an answer that begins before they have read their client's request to its
        # end ("use of closed network connection"), as no model is quick enough to begin.
        yield 0.2
        yield from answer_words()(submit)

    with ExitStack() as stack:
        node = stack.enter_context(FakeNode())
        worker = node.worker()
        # More notice than a real front end gives: the machine may keep anyone waiting meanwhile.
        fronts = [
            stack.enter_context(RunningFront(node.control, notice_s=2.5, grace_s=PATIENCE_S))
            for _ in range(3)
        ]
        ports = [front.port for front in fronts]
        client = stack.enter_context(proxied(name, tmp_path, ports))
        RunningFront.wait(lambda: client.get("/readyz").status_code == 200)

        worker.script = answer_then(1, rest)
        with client.stream("POST", "/v1/chat/completions", json=HELLO) as response:
            lines = response.iter_lines()
            assert any(WORDS[0] in line for line in lines), "the first word, while the rest waits"
            worker.script = answer_words()
            gate.set()
            assert list(lines)[-2:] == ["data: [DONE]", ""]

        worker.script = not_at_once
        for front in fronts[:2]:
            front.stop()
        while any(alive(port) for port in ports[:2]):
            # Every request is a new connection to the proxy, and one of its own behind it.
            answer = httpx.post(f"{client.base_url}/v1/chat/completions", json=HELLO, timeout=30)
            assert answer.status_code == 200
            assert answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("name", PROXIES)
def test_they_look_twice_at_a_front_end_that_gives_notice(name: str) -> None:
    text = (DEPLOY / name).read_text()
    [often] = re.findall(r"\b(?:inter|health_interval) (\d+)ms\b", text)
    notice_s = FrontSettings(nodes=()).notice_s
    assert 2 * int(often) / 1000 <= notice_s
    assert f"connections for another {notice_s:g} s" in text


def alive(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.process
@pytest.mark.parametrize("name", PROXIES)
def test_where_none_is_ready_the_front_end_says_when_to_come_again(
    name: str, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        node = stack.enter_context(FakeNode())
        node.worker()
        fronts = [stack.enter_context(RunningFront(node.control)) for _ in range(3)]
        client = stack.enter_context(proxied(name, tmp_path, [front.port for front in fronts]))
        RunningFront.wait(lambda: client.get("/readyz").status_code == 200)
        node.lose("slot-1", "killed")
        found: list[httpx.Response] = []

        def refused() -> bool:
            """Returns True if a front end refused: between two checks a proxy may know of none, and
            refuses by itself."""
            answer = client.get("/readyz")
            if answer.status_code == 503 and "json" in answer.headers.get("content-type", ""):
                found.append(answer)
            return bool(found)

        RunningFront.wait(refused)
        assert "reason" in found[0].json()
        assert int(found[0].headers["retry-after"]) > 0
