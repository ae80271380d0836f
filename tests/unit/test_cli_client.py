"""The API key that commands send to a running server, and nobody else gets."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from mayfly_cli.commands.client import connect, goes_direct


@pytest.mark.parametrize(
    ("environment", "sent"),
    [
        ({}, None),
        ({"MAYFLY_API_KEY": "one"}, "Bearer one"),
        ({"MAYFLY_ADMIN_KEY": "all"}, "Bearer all"),
        ({"MAYFLY_API_KEY": "one", "MAYFLY_ADMIN_KEY": "all"}, "Bearer all"),
        ({"MAYFLY_API_KEY": "one", "MAYFLY_ADMIN_KEY": ""}, "Bearer one"),
    ],
)
def test_the_key_that_opens_most(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], sent: str | None
) -> None:
    for name in ("MAYFLY_API_KEY", "MAYFLY_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with connect("127.0.0.1:1") as client:
        assert client.headers.get("authorization") == sent


@contextmanager
def listening(answer: str, heard: list[str]) -> Iterator[int]:
    """A server that answers everything with a text, and notes the requests' first lines."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            heard.append(self.requestline)
            self.send_response(200)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield server.server_port
        finally:
            server.shutdown()


@pytest.mark.parametrize("variable", ["http_proxy", "all_proxy"])
def test_N19_a_proxy_is_not_asked_for_a_server_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("MAYFLY_API_KEY", "secret")
    proxied: list[str] = []
    with listening("proxy", proxied) as proxy, listening("server", []) as port:
        monkeypatch.setenv(variable, f"http://127.0.0.1:{proxy}")
        for host in ("127.0.0.1", "localhost"):
            with connect(f"{host}:{port}") as client:
                assert client.get("/health").text == "server"
        assert proxied == []
        with connect("http://mayfly.invalid") as client:
            assert client.get("/health").text == "proxy"
        assert len(proxied) == 1
        monkeypatch.setenv("no_proxy", "other, mayfly.invalid")
        with connect("http://mayfly.invalid") as client, pytest.raises(httpx.ConnectError):
            client.get("/health")
        assert len(proxied) == 1


@pytest.mark.parametrize(
    ("url", "direct"),
    [
        ("http://localhost:8000", True),
        ("http://LOCALHOST.", True),
        ("http://a.localhost", True),
        ("http://127.9.9.9:1", True),
        ("http://[::1]:8000", True),
        ("http://[::ffff:127.0.0.1]", True),
        ("http://0.0.0.0:8000", True),
        ("http://10.1.2.3", True),
        ("http://11.1.2.3", False),
        ("http://[fd00::5]", True),
        ("http://[fd01::5]", False),
        ("http://gpu.corp.example", True),
        ("http://corp.example", True),
        ("http://xcorp.example", False),
        ("http://one.example:8001", True),
        ("http://one.example:8002", False),
        ("https://tls.example", True),
        ("http://localhost.example", False),
    ],
)
def test_N19_what_no_proxy_names_goes_past_the_proxy(
    monkeypatch: pytest.MonkeyPatch, url: str, direct: bool
) -> None:
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    names = "10.0.0.0/8, fd00::/16, .corp.example, one.example:8001, tls.example:443"
    monkeypatch.setenv("no_proxy", names)
    assert goes_direct(httpx.URL(url)) == direct
