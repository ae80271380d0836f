"""Files of the live page, and the events that it follows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from mayfly_cli.commands.client import events
from mayfly_protocol.roster import Autopsy
from mayfly_server.api.admin.page import PATHS
from mayfly_server.http.api_keys import Key, digest_of
from support.doubles.fake_node import FakeNode
from support.running_front import RunningFront

KEYS = (Key("someone", digest_of("key-of-someone")), Key("me", digest_of("key-of-me"), admin=True))
AUTOPSY = Autopsy(
    *("epoch-1", "slot-1", "tiny", 1, 1001, "crashed", "worker", "killed by SIGSEGV", "decode"),
    *(12, 2, 30.0, "a new worker is started at once", 4.0),
)


@contextmanager
def pictures(front: RunningFront, **headers: str) -> Iterator[Iterator[dict[str, Any]]]:
    with front.client.stream("GET", "/mayfly/events", headers=headers) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        yield (json.loads(event) for event in events(response.iter_lines()))


def test_every_file_answers_get_and_head(front: RunningFront) -> None:
    assert {"/", "/page/page.css", "/page/main.js", "/page/icon.svg"} <= PATHS
    for path in PATHS:
        got, head = front.client.get(path), front.client.head(path)
        assert (got.status_code, head.status_code) == (200, 200)
        assert head.content == b""
        assert head.headers["content-length"] == got.headers["content-length"]
        assert got.headers["x-content-type-options"] == "nosniff"
        assert "charset=utf-8" in got.headers["content-type"] or path.endswith(".svg")
        again = front.client.get(path, headers={"if-none-match": got.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


def test_nothing_of_the_page_is_from_elsewhere(front: RunningFront) -> None:
    """The page names no other origin, and its headers have the browser enforce that."""
    for path in PATHS:
        response = front.client.get(path)
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "connect-src 'self';" in policy
        assert "unsafe" not in policy
        strangers = re.findall(r"https?://[^\"' )]+|[\"'(]//[a-z]", response.text)
        assert set(strangers) <= {"http://www.w3.org/2000/svg"}
    index = front.client.get("/").text
    assert " style=" not in index
    assert not re.search(r"\son[a-z]+=", index)
    named = re.findall(r'(?:href|src)="(page/[^"]+)"', index)
    assert {f"/{name}" for name in named} <= PATHS
    imported = [
        (path, name)
        for path in PATHS
        for name in re.findall(r'from "\./([^"]+)"', front.client.get(path).text)
    ]
    assert imported
    assert all(f"/page/{name}" in PATHS for _, name in imported)


def test_events_are_the_whole_picture_at_once_and_at_each_change(
    front: RunningFront, node: FakeNode
) -> None:
    with pictures(front) as stream:
        first = next(stream)
        status = front.client.get("/mayfly/status").json()
        assert first["leaving"] is False
        [told], [known] = first["nodes"], status["nodes"]
        [slot] = told["slots"]
        assert slot.pop("tokens_per_s") is None
        assert [slot] == known["slots"]
        assert slot["rows"] == 0
        assert told["autopsies"] == []

        node.change(autopsies=(AUTOPSY,))
        recorded = next(each for each in stream if each["nodes"][0]["autopsies"])
        [autopsy] = recorded["nodes"][0]["autopsies"]
        assert (autopsy["id"], autopsy["kind"]) == ("epoch-1", "crashed")
        assert autopsy["first_cause"] == "killed by SIGSEGV"
        assert autopsy["meaning"]
        assert autopsy["advice"]

        node.lose("slot-1", "crashed")
        lost = next(each for each in stream if each["nodes"][0]["losses"])
        assert lost["nodes"][0]["slots"][0]["state"] == "backoff"
        assert lost["nodes"][0]["losses"][0]["kind"] == "crashed"


def test_events_tell_how_fast_a_worker_writes() -> None:
    with FakeNode() as node:
        node.worker()
        with RunningFront(node.control) as front, pictures(front) as stream:
            known = (each["nodes"][0]["slots"][0]["tokens_per_s"] for each in stream)
            assert next(rate for rate in known if rate is not None) == 0.0


def test_events_end_with_a_front_end_that_leaves() -> None:
    """Long before its grace for streams does."""
    with FakeNode() as node:
        node.worker()
        with RunningFront(node.control, grace_s=60.0) as front, pictures(front) as stream:
            assert next(stream)["leaving"] is False
            front.stop()
            assert [each["leaving"] for each in stream][-1] is True


def test_with_keys_the_page_is_open_and_what_it_shows_is_not(node: FakeNode) -> None:
    def status(path: str, key: str = "") -> int:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        with front.client.stream("GET", path, headers=headers) as response:
            return response.status_code

    with RunningFront(node.control, ready=False, keys=KEYS) as front:
        assert [status(path) for path in sorted(PATHS)] == [200] * len(PATHS)
        paths = ("/mayfly/events", "/mayfly/status", "/v1/models")
        assert [status(path) for path in paths] == [401, 401, 401]
        assert [status(path, "key-of-someone") for path in paths] == [403, 403, 200]
        assert [status(path, "key-of-me") for path in paths] == [200, 200, 200]


def test_a_page_of_another_site_may_not_frame_or_read_it(front: RunningFront) -> None:
    policy = front.client.get("/").headers["content-security-policy"]
    assert "frame-ancestors 'none'" in policy
    response = front.client.get("/mayfly/status", headers={"origin": "https://example.com"})
    assert "access-control-allow-origin" not in response.headers
    rebound = httpx.get(f"{front.url}/", headers={"host": "evil.example"})
    assert rebound.status_code == 421
