"""Routes that each API key may use, and quotas of a key. docs/reported-faults.md lists the ids in
test names."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from mayfly_server.api.admin.page import PATHS as PAGE
from mayfly_server.http.api_keys import Key, digest_of, file_entry, from_environment
from mayfly_server.http.auth import PROBES
from support.doubles.fake_node import FakeNode, accept, finish, step
from support.raw_http import ADMIN, CHAT, HELLO, SECRET, TEXT, bearer, connect, read_to_end
from support.running_front import RunningFront

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


def every_route(front: RunningFront) -> list[str]:
    """The paths of the application's own table, parameters filled in."""

    def paths(routes: Any) -> Iterator[str]:
        for route in routes:
            if hasattr(route, "path"):
                yield re.sub(r"\{[^}]*\}", "x", route.path)
            for name in ("routes", "original_router"):
                inner = getattr(route, name, None)
                if inner is not None:
                    yield from paths(getattr(inner, "routes", inner))

    found = sorted(set(paths(front.app.routes)))
    assert {CHAT, TEXT, "/v1/models", "/livez", "/readyz", "/metrics", "/mayfly/status"} <= set(
        found
    )
    return [*found, "/", "/nonsense", "/v1/nonsense", "/docs", "/mayfly/nonsense", "//livez"]


WRONG = {
    "no key": {},
    "a wrong key": bearer("wrong"),
    "an empty key": {"authorization": "Bearer"},
    "no scheme": {"authorization": SECRET},
    "another scheme": {"authorization": f"Basic {SECRET}"},
    "a part of the key": bearer(SECRET[:-1]),
    "more than the key": bearer(SECRET + "x"),
    "a cookie": {"cookie": f"key={SECRET}"},
    "an empty header": {"x-api-key": ""},
}


@pytest.mark.parametrize("how", WRONG)
def test_R125_without_a_right_key_only_probes_and_the_page_answer(
    locked: RunningFront, how: str
) -> None:
    for path in every_route(locked):
        for method in METHODS:
            response = locked.client.request(
                method,
                locked.url + path,
                headers=WRONG[how],
                params={"key": SECRET, "api_key": SECRET},
            )
            if path in PROBES:
                assert response.status_code in (200, 405), (method, path)
                assert "reason" not in response.text
                continue
            if path in PAGE:
                assert response.status_code in (200, 405), (method, path)
                assert "tiny" not in response.text
                continue
            assert response.status_code == 401, (method, path)
            assert response.headers["www-authenticate"] == "Bearer"
            if method != "HEAD":
                assert set(response.json()["error"]) >= {"message", "type"}


@pytest.mark.parametrize(
    "headers",
    [bearer(SECRET), {"authorization": f"bearer {SECRET}"}, {"x-api-key": SECRET}, bearer(ADMIN)],
)
def test_R125_a_right_key_opens(locked: RunningFront, headers: dict[str, str]) -> None:
    assert locked.client.post(CHAT, json=HELLO, headers=headers).status_code == 200
    assert locked.client.get("/v1/models", headers=headers).status_code == 200
    assert locked.client.get("/nonsense", headers=headers).status_code == 404
    seen = [
        locked.client.get(path, headers=headers).status_code
        for path in ("/mayfly/status", "/metrics", "/openapi.json")
    ]
    assert seen == ([200] * 3 if ADMIN in str(headers) else [403] * 3)


def test_R125_probes_say_no_more_than_they_have_to() -> None:
    with (
        FakeNode() as node,
        RunningFront(
            node.control, ready=False, keys=from_environment({"MAYFLY_API_KEYS": SECRET})
        ) as front,
    ):
        node.worker(state="loading", load_done=1, load_total=4, age_s=1.0)
        front.wait(lambda: "25 %" in front.client.get("/readyz", headers=bearer(SECRET)).text)
        for path in ("/readyz", "/health"):
            response = front.client.get(path)
            assert (response.status_code, response.json()) == (503, {"status": "unavailable"})
            assert "retry-after" not in response.headers
        node.show(replace(node.view("slot-1"), state="ready", running=1))
        front.wait(lambda: front.client.get("/health").json() == {"status": "stalled"})
        assert "tiny" in front.client.get("/health", headers=bearer(SECRET)).json()["reason"]


@pytest.mark.parametrize("path", sorted(PROBES))
def test_R125_probes_answer_to_their_heads_too(locked: RunningFront, path: str) -> None:
    response = locked.client.head(path)
    assert (response.status_code, response.content) == (200, b"")


def test_R125_the_metrics_have_a_switch_of_their_own(node: FakeNode) -> None:
    keys = from_environment({"MAYFLY_API_KEYS": SECRET})
    with RunningFront(node.control, keys=keys, metrics="open") as front:
        assert front.client.get("/metrics").status_code == 200
        assert front.client.get("/mayfly/status").status_code == 401
    with RunningFront(node.control, metrics="off") as front:
        assert front.client.get("/metrics").status_code == 404


def answer_of(front: RunningFront, method: str, path: str, headers: dict[str, str]) -> str:
    """Headers and body; of events that never end, the first."""
    url = front.url + path
    with front.client.stream(method, url, headers=headers, content="{") as response:
        endless = response.headers.get("content-type", "").startswith("text/event-stream")
        body = next(response.iter_text()) if endless else response.read().decode()
        return f"{response.headers} {body}"


def test_R127_keys_are_never_told(
    locked: RunningFront, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    seen = []
    with caplog.at_level(logging.DEBUG):
        for path in every_route(locked):
            for key in (SECRET, ADMIN, "wrong"):
                for method in ("GET", "POST"):
                    seen.append(answer_of(locked, method, path, bearer(key)))
        with connect(locked) as connection:
            connection.sendall(f"GET / HTTP/1.1\r\nAuthorization: {SECRET}\r\n\0\r\n\r\n".encode())
            seen.append(read_to_end(connection).decode())
    seen += [caplog.text, *capfd.readouterr()]
    for text in seen:
        assert SECRET not in text
        assert ADMIN not in text
        assert digest_of(SECRET).hex() not in text


def test_keys_have_limits_and_a_file_that_may_change(node: FakeNode, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(file_entry("alice", SECRET, requests_per_minute=2))
    with RunningFront(node.control, api_keys_file=file) as front:

        def status(key: str) -> int:
            return front.client.post(CHAT, json=HELLO, headers=bearer(key)).status_code

        assert [status(SECRET) for _ in range(3)] == [200, 200, 429]
        refused = front.client.get("/v1/models", headers=bearer(SECRET))
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert refused.json()["error"]["retryable"] is True
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert refused.headers["x-should-retry"] == "true"
        assert status("secret-2") == 401
        file.write_text(file_entry("bob", "secret-2"))
        front.wait(lambda: status("secret-2") == 200)
        assert status(SECRET) == 401


def test_a_key_may_have_so_many_requests_at_a_time() -> None:
    gate = threading.Event()

    def held(submit: Any) -> Iterator[Any]:
        yield accept(submit)
        yield step(submit, 0, "a")
        yield gate
        yield step(submit, 1, "b", finish="stop")
        yield finish(submit)

    keys = [Key("alice", digest_of(SECRET), concurrency=1), Key("bob", digest_of("b"))]
    with FakeNode() as node, RunningFront(node.control, ready=False, keys=keys) as front:
        node.worker(held)
        front.wait_workers(1)
        asked = {"json": HELLO | {"stream": True}, "headers": bearer(SECRET)}
        with front.client.stream("POST", CHAT, **asked) as stream:  # type: ignore[arg-type]
            assert stream.status_code == 200
            again = httpx.get(f"{front.url}/v1/models", headers=bearer(SECRET))
            assert again.status_code == 429
            assert again.json()["error"]["code"] == "concurrency_limit_exceeded"
            assert httpx.get(f"{front.url}/v1/models", headers=bearer("b")).status_code == 200
            gate.set()
            assert stream.read().endswith(b"data: [DONE]\n\n")
        front.wait(
            lambda: httpx.get(f"{front.url}/v1/models", headers=bearer(SECRET)).status_code == 200
        )
