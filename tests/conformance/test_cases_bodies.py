"""Request bodies, addresses and model names as they come over the network. docs/reported-faults.md
lists the ids in test names."""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from support.api_client import CHAT, PATHS, TEXT, Json, answer, body, choice, post, refused, user
from support.server import Server, serving

JSON = {"content-type": "application/json"}
HALF, PAIR = "\\ud83d", "\\ud83d\\ude00"

both_routes = pytest.mark.parametrize("path", PATHS)


def post_routes(server: Server) -> list[str]:
    document = server.http.get("/openapi.json").json()
    return [path for path, methods in document["paths"].items() if "post" in methods]


def raw(server: Server, path: str, content: bytes | str, **headers: str) -> httpx.Response:
    return server.http.post(path, content=content, headers=JSON | headers)


def with_text(server: Server, path: str, place: str, text: str) -> str:
    """A body with an escape, as it is written, in one of its strings."""
    mark = "MARK"
    asked = body(server, path)
    match place:
        case "text":
            asked |= {"messages": [user(f"a{mark}b")]} if path == CHAT else {"prompt": f"a{mark}b"}
        case "part":
            asked["messages"] = [user([{"type": "text", "text": mark}])]
        case "tool":
            asked["tools"] = [{"type": "function", "function": {"name": f"f{mark}"}}]
        case "description":
            function = {"name": "f", "description": mark}
            asked["tools"] = [{"type": "function", "function": function}]
        case "stop":
            asked["stop"] = [mark]
        case "key":
            asked[mark] = 1
        case _:
            asked[place] = mark
    return json.dumps(asked).replace(mark, text)


@pytest.mark.parametrize("half", [HALF, "\\udc00", "\\ude00\\ud83d", f"{HALF}{PAIR}"])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("path", "place"),
    [
        *[(path, place) for path in PATHS for place in ("text", "stop", "model", "user", "key")],
        *[(CHAT, place) for place in ("part", "tool", "description")],
        (TEXT, "guided_regex"),
    ],
)
def test_R63_half_a_character_is_no_text(
    tiny: Server, path: str, place: str, half: str, streamed: bool
) -> None:
    asked = with_text(tiny, path, place, half)
    asked = asked[:-1] + f', "stream": {json.dumps(streamed)}}}'
    error = refused(raw(tiny, path, asked))
    assert error["code"] == "invalid_json"
    assert "Error" not in error["message"] and "Traceback" not in error["message"]


@both_routes
@pytest.mark.parametrize("broken", [b"\xff", b"\xc3", b"\xed\xa0\xbd", b"\xc0\x80", b"\xf5\x80"])
def test_R63_bytes_that_are_no_utf_8(tiny: Server, path: str, broken: bytes) -> None:
    asked = json.dumps(body(tiny, path)).encode().replace(b'"hi"', b'"h' + broken + b'i"')
    assert broken in asked
    assert refused(raw(tiny, path, asked))["code"] == "invalid_json"


@both_routes
def test_R63_whole_pairs_are_characters(tiny: Server, path: str) -> None:
    escaped = raw(tiny, path, with_text(tiny, path, "text", PAIR)).json()
    plain = raw(tiny, path, with_text(tiny, path, "text", "😀").encode()).json()
    assert escaped["choices"] == plain["choices"]
    assert escaped["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    assert raw(tiny, path, with_text(tiny, path, "stop", PAIR)).status_code == 200


@both_routes
def test_R64_bodies_in_chunks(tiny: Server, path: str) -> None:
    asked = json.dumps(body(tiny, path)).encode()

    def pieces() -> Iterator[bytes]:
        yield asked[:20]
        yield asked[20:]

    response = tiny.http.post(path, content=pieces(), headers=JSON)
    assert response.request.headers["transfer-encoding"] == "chunked"
    assert response.status_code == 200, response.text


@both_routes
def test_R64_a_client_that_asks_before_it_sends(tiny: Server, path: str) -> None:
    asked = json.dumps(body(tiny, path)).encode()
    connection = http.client.HTTPConnection("127.0.0.1", tiny.port, timeout=30)
    try:
        connection.putrequest("POST", path)
        for name, value in (
            ("content-type", "application/json"),
            ("content-length", str(len(asked))),
            ("expect", "100-continue"),
        ):
            connection.putheader(name, value)
        connection.endheaders()
        assert connection.sock is not None
        assert connection.sock.recv(12, 2).startswith(b"HTTP/1.1 100")  # MSG_PEEK
        connection.send(asked)
        response = connection.getresponse()
        assert response.status == 200
        assert json.loads(response.read())["choices"]
    finally:
        connection.close()


@both_routes
@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        (None, 200),
        ("application/json; charset=utf-8", 200),
        ("APPLICATION/JSON", 200),
        ("text/plain", 415),
        ("multipart/form-data; boundary=x", 415),
    ],
)
def test_R64_content_types(tiny: Server, path: str, content_type: str | None, status: int) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    asked = json.dumps(body(tiny, path)).encode()
    response = tiny.http.post(path, content=asked, headers=headers)
    if status == 200:
        assert response.status_code == 200, response.text
    else:
        refused(response, None, status)


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '"hi"', "null", "5", '{"a": 1} {"b": 2}', '{"a": 1,}', "{'a': 1}", "\0", " "],
)
def test_R65_bodies_that_are_no_object(tiny: Server, content: str) -> None:
    routes = post_routes(tiny)
    assert {CHAT, TEXT} <= set(routes)
    for path in routes:
        assert refused(raw(tiny, path, content))["code"] == "invalid_json"


def test_R65_nesting_without_end(tiny: Server) -> None:
    for path in post_routes(tiny):
        for content in ("[" * 100_000, '{"a":' * 100_000, '{"a":' * 500 + "1" + "}" * 500):
            assert refused(raw(tiny, path, content))["code"] == "invalid_json"
    assert choice(tiny, CHAT)["text"]


def test_R65_wrong_methods_and_addresses(tiny: Server) -> None:
    for path in post_routes(tiny):
        for method in ("GET", "PUT", "DELETE", "PATCH"):
            by_id = method in ("GET", "DELETE") and path.startswith("/v1/responses/")
            refused(tiny.http.request(method, path), None, 404 if by_id else 405)
    for path in ("/v1", "/v1/nothing", "/v1/chat", "/%00"):
        for method in ("GET", "POST"):
            refused(tiny.http.request(method, path), None, 404)
    refused(tiny.http.post("/"), None, 405)  # the live page
    refused(tiny.http.post("/v1/models"), None, 405)


SPY = """
import sys

def spy(event, arguments):
    if event in ("socket.connect", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname"):
        address = arguments[0] if "get" in event else arguments[1]
        if "get" in event or isinstance(address, tuple):
            with open({log!r}, "a") as log:
                print(event, address, file=log)

sys.addaudithook(spy)
"""


@pytest.fixture(scope="module")
def spied(
    tools_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Path]]:
    """A server under a name with a slash, free to look for models anywhere, whose processes write
    down each connection that they ask for."""
    folder = tmp_path_factory.mktemp("spied")
    log = folder / "connections"
    (folder / "sitecustomize.py").write_text(SPY.format(log=str(log)))
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "0"}
    with serving(
        tools_model, folder, "--name", "some-org/small-8bit", environment=environment
    ) as server:
        yield server, log


def test_R68_names_of_the_model(spied: tuple[Server, Path]) -> None:
    server, log = spied
    before = log.read_text()  # its own address, when it started
    [listed] = server.http.get("/v1/models").json()["data"]
    assert listed["id"] == "some-org/small-8bit"
    for path in PATHS:
        asked: Json = {"messages": [user("hi")]} if path == CHAT else {"prompt": "hi"}
        for name in (listed["id"], "small-8bit"):
            found = server.post(path, {**asked, "model": name, "max_tokens": 2})
            assert found.status_code == 200
            assert found.json()["model"] == listed["id"]
        for name in (
            *("nonsense", "some-org", "some-org/", "other-org/small-8bit", "small", "SMALL-8BIT"),
            *("mlx-community/Qwen3-4B-4bit", str(server.folder), server.folder.name),
            *("https://huggingface.co/gpt2", "../small-8bit", "some-org/small-8bit/"),
        ):
            error = refused(server.post(path, {**asked, "model": name}), "model", 404)
            assert error["code"] == "model_not_found"
    assert server.http.get("/v1/models/some-org/small-8bit").json()["id"] == listed["id"]
    refused(server.http.get("/v1/models/gpt2"), "model", 404)
    assert log.read_text() == before


def test_R68_a_folder_is_served_under_its_own_name(tiny: Server) -> None:
    [listed] = tiny.http.get("/v1/models").json()["data"]
    assert listed["id"] == tiny.folder.name
    assert answer(tiny, CHAT)["model"] == listed["id"]
    refused(post(tiny, CHAT, model=str(tiny.folder)), "model", 404)
