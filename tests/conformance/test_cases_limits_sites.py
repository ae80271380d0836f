"""Names of models, hosts and other sites that must not open anything. docs/reported-faults.md lists
the ids in test names."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from mayfly_server.http.api_keys import from_environment
from support.doubles.fake_node import FakeNode
from support.raw_http import CHAT, HELLO, SECRET, TEXT, bearer, status_of_raw
from support.running_front import RunningFront


def test_R122_names_are_looked_up_and_nothing_else(
    front: RunningFront, node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No connection, no file, no worker, whatever the name is."""
    opened: list[Any] = []

    def refuse(*arguments: Any, **_: Any) -> Any:
        opened.append(arguments)
        raise OSError("not here")

    before = len(node.workers[0].submits)
    names = [f"someorg/some-{n}b" for n in range(16)]
    names += ["/etc/passwd", "../tiny", "https://evil.example/x", "file:///etc/passwd"]
    front.client.get("/livez")  # the connection is there
    with monkeypatch.context() as patched:
        patched.setattr(io, "open", refuse)
        patched.setattr("pathlib.Path.open", refuse)
        patched.setattr("socket.create_connection", refuse)
        patched.setattr("socket.getaddrinfo", refuse)
        for name in names:
            response = front.client.post(CHAT, json=HELLO | {"model": name})
            assert response.status_code == 404
            assert response.json()["error"]["code"] == "model_not_found"
            assert front.client.get(f"/v1/models/{name}").status_code in (404, 405)
    assert opened == []
    assert len(node.workers[0].submits) == before


GOOD_HOSTS = ("localhost", "LOCALHOST:1", "127.0.0.1:8000", "[::1]:8000", "[::1]", "app.localhost")
BAD_HOSTS = ("evil.example", "evil.example:8000", "localhost.evil.example", "0.0.0.0", "10.0.0.1")


@pytest.mark.parametrize("path", ["/livez", "/v1/models", "/nonsense", "/mayfly/status"])
def test_R137_foreign_hosts_without_a_key(front: RunningFront, path: str) -> None:
    for host in BAD_HOSTS:
        assert status_of_raw(front, f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n") == 421
        assert (
            status_of_raw(front, f"GET http://localhost{path} HTTP/1.1\r\nHost: {host}\r\n\r\n")
            == 421
        )
    for host in GOOD_HOSTS:
        assert status_of_raw(front, f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n") in (200, 404)
    assert status_of_raw(front, f"GET {path} HTTP/1.0\r\n\r\n") in (200, 404)
    for head in ("", "Host:\r\n", "Host: localhost\r\nHost: localhost\r\n", "Host: a b\r\n"):
        assert status_of_raw(front, f"GET {path} HTTP/1.1\r\n{head}\r\n") == 400


def test_R137_with_a_key_any_host_will_do(locked: RunningFront, node: FakeNode) -> None:
    """A page that had its name rebound has no key. Configured hosts hold all the same."""
    head = f"Authorization: Bearer {SECRET}\r\n\r\n"
    for host in (*BAD_HOSTS, *GOOD_HOSTS):
        assert status_of_raw(locked, f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\n{head}") == 200
    keys = from_environment({"MAYFLY_API_KEYS": SECRET})
    with RunningFront(node.control, keys=keys, allowed_hosts=("api.example",)) as front:
        for host, status in {"api.example": 200, "localhost": 200, "evil.example": 421}.items():
            assert (
                status_of_raw(front, f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\n{head}") == status
            )


SITES = {"cross-site": 403, "same-site": 403, "same-origin": 200, "none": 200}
"""Values of the header Sec-Fetch-Site, and the status of a POST with it and without an Origin."""
FOREIGN = ("https://evil.example", "null", "http://localhost:3000", "http://localhost")


@pytest.mark.parametrize("origin", FOREIGN)
@pytest.mark.parametrize("content_type", ["text/plain", "application/json", None])
def test_R138_other_sites_start_nothing(
    front: RunningFront, node: FakeNode, origin: str, content_type: str | None
) -> None:
    before = len(node.workers[0].submits)
    headers = {"origin": origin} | ({"content-type": content_type} if content_type else {})
    for path, asked in ((CHAT, HELLO), (TEXT, {"prompt": "hi"})):
        response = front.client.post(path, content=json.dumps(asked), headers=headers)
        assert response.status_code == 403
        assert "access-control-allow-origin" not in response.headers
        preflight = {"origin": origin, "access-control-request-method": "POST"}
        response = front.client.options(path, headers=preflight)
        assert response.status_code == 405
        assert not [name for name in response.headers if name.startswith("access-control")]
    assert len(node.workers[0].submits) == before


@pytest.mark.parametrize(("site", "status"), SITES.items())
def test_S25_a_page_of_another_site_that_sends_no_origin_starts_nothing(
    front: RunningFront, node: FakeNode, site: str, status: int
) -> None:
    before = len(node.workers[0].submits)
    assert front.client.get("/v1/models", headers={"sec-fetch-site": site}).status_code == 200
    for path, asked in ((CHAT, HELLO), (TEXT, {"prompt": "hi"})):
        response = front.client.post(path, json=asked, headers={"sec-fetch-site": site})
        assert response.status_code == status
    assert len(node.workers[0].submits) - before == (2 if status == 200 else 0)


def test_S25_an_allowed_origin_is_allowed_whatever_the_site(node: FakeNode) -> None:
    known = {"origin": "https://app.example", "sec-fetch-site": "cross-site"}
    with RunningFront(node.control, cors_origins=(known["origin"],)) as front:
        assert front.client.post(CHAT, json=HELLO, headers=known).status_code == 200
        del known["origin"]
        assert front.client.post(CHAT, json=HELLO, headers=known).status_code == 403
    with RunningFront(node.control, cors_origins=("*",)) as front:
        assert front.client.post(CHAT, json=HELLO, headers=known).status_code == 200


def test_R138_this_server_is_no_other_site(front: RunningFront) -> None:
    response = front.client.post(CHAT, json=HELLO, headers={"origin": front.url})
    assert response.status_code == 200
    assert front.client.get("/livez", headers={"origin": "null"}).status_code == 200


def test_R138_configured_origins(node: FakeNode) -> None:
    known, other = "https://app.example", "https://evil.example"
    keys = from_environment({"MAYFLY_API_KEYS": SECRET})
    with RunningFront(node.control, cors_origins=(known,), keys=keys) as front:
        preflight = {
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization, content-type",
        }
        allowed = front.client.options(CHAT, headers=preflight | {"origin": known})
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == known
        response = front.client.post(CHAT, json=HELLO, headers=bearer(SECRET) | {"origin": known})
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == known
        assert "access-control-allow-credentials" not in response.headers
        without_key = front.client.post(CHAT, json=HELLO, headers={"origin": known})
        assert without_key.status_code == 401
        assert without_key.headers["access-control-allow-origin"] == known
        for origin in (other, "null", f"{known}.evil.example"):
            refused = front.client.options(CHAT, headers=preflight | {"origin": origin})
            assert refused.status_code == 400
            posted = front.client.post(
                CHAT, json=HELLO, headers=bearer(SECRET) | {"origin": origin}
            )
            assert posted.status_code == 403
            for answer in (refused, posted):
                assert "access-control-allow-origin" not in answer.headers
    with RunningFront(node.control, cors_origins=("*",)) as front:
        response = front.client.post(CHAT, json=HELLO, headers={"origin": other})
        assert response.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in response.headers
