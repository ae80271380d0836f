"""Helpers for tests over HTTP: send requests of OpenAI's and Anthropic's APIs to a running server,
and read and check its answers and streams."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
from tokenizers import Tokenizer

from support.server import Server

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PATHS = (CHAT, TEXT)

Json = dict[str, Any]


def user(content: Any) -> Json:
    return {"role": "user", "content": content}


def function(name: str, /, **properties: Any) -> Json:
    """Returns an OpenAI tool definition; ``properties`` maps each parameter to its JSON type."""
    typed = {key: {"type": kind} for key, kind in properties.items()}
    parameters = {"type": "object", "properties": typed}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def body(server: Server, path: str, **fields: Any) -> Json:
    """Returns the body of a greedy request for 8 tokens to the route ``path``; ``fields`` are added
    and override the defaults."""
    asked: Json = {"prompt": "hi"} if path == TEXT else {"messages": [user("hi")]}
    return {"model": server.model, **asked, "temperature": 0, "max_tokens": 8, **fields}


def post(server: Server, path: str, **fields: Any) -> httpx.Response:
    return server.post(path, body(server, path, **fields))


def answer(server: Server, path: str, **fields: Any) -> Json:
    response = post(server, path, **fields)
    assert response.status_code == 200, response.text
    content: Json = response.json()
    return content


def choice(server: Server, path: str, **fields: Any) -> Json:
    """Sends a request and returns the answer's only choice, with the text under the key ``text``
    for chat completions and completions alike."""
    [only] = answer(server, path, **fields)["choices"]
    return {"text": only["message"]["content"], **only} if path == CHAT else dict(only)


def tokens(server: Server, **asked: Any) -> list[int]:
    """Returns the token ids that the server's /tokenize gives for a ``prompt`` or ``messages``."""
    response = server.post("/tokenize", asked)
    assert response.status_code == 200, response.text
    found: list[int] = response.json()["tokens"]
    return found


def fields_of(server: Server, path: str) -> Json:
    """Returns the request fields of a route, by name, from the server's OpenAPI document."""
    document = server.http.get("/openapi.json").json()
    content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    name = content["schema"]["$ref"].rpartition("/")[2]
    fields: Json = document["components"]["schemas"][name]["properties"]
    return fields


def refused(response: httpx.Response, param: str | None = None, status: int = 400) -> Json:
    """Checks that a response is an error with this HTTP status, about the request field ``param``;
    returns the error object."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"].startswith("application/json")
    error: Json = response.json()["error"]
    assert error["message"]
    if response.request.url.path.startswith("/v1/messages"):
        return _anthropic(response.json())
    assert {"message", "type", "param", "code"} <= error.keys()
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error
    return error


def _anthropic(content: Json) -> Json:
    """Checks an error in Anthropic's form; returns the error object with its code under ``code``,
    as in OpenAI's form. Anthropic's form names no request field."""
    assert content["type"] == "error"
    assert content["error"]["type"] in ("invalid_request_error", "not_found_error")
    return {**content["error"], "code": content["error"]["details"]["error_code"]}


@dataclass
class Stream:
    """A server-sent event stream that was read to its end: its events in order, and the times of
    their arrival (monotonic clock, seconds)."""

    status: int
    events: list[Json] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    comments: list[str] = field(default_factory=list)
    done: bool = False

    @property
    def chunks(self) -> list[Json]:
        return [event for event in self.events if "choices" in event]

    @property
    def errors(self) -> list[Json]:
        return [event["error"] for event in self.events if "error" in event]

    @property
    def usage(self) -> Json | None:
        used = [chunk["usage"] for chunk in self.chunks if chunk.get("usage")]
        assert len(used) <= 1
        return used[0] if used else None

    def of(self, index: int) -> list[Json]:
        """Returns the parts of one choice, by its index, from all chunks in order."""
        return [c for chunk in self.chunks for c in chunk["choices"] if c["index"] == index]

    def pieces(self, index: int = 0, key: str = "content") -> list[str]:
        """Returns the pieces of one choice's text in order; ``key`` names the field of a chat
        chunk's delta."""
        parts = (c["text"] if "text" in c else c["delta"].get(key) for c in self.of(index))
        return [part for part in parts if part]

    def text(self, index: int = 0, key: str = "content") -> str:
        return "".join(self.pieces(index, key))

    def finish(self, index: int = 0) -> str:
        """Returns a choice's finish reason; checks that only the choice's last chunk has one."""
        reasons = [c["finish_reason"] for c in self.of(index)]
        assert all(reason is None for reason in reasons[:-1])
        assert reasons[-1] is not None
        return str(reasons[-1])

    def calls(self, index: int = 0) -> dict[int, Json]:
        """Returns a choice's tool calls by their index: id, name and arguments, put together from
        the stream's pieces as a client does."""
        calls: dict[int, Json] = {}
        for part in self.of(index):
            for piece in part["delta"].get("tool_calls") or []:
                known = piece["index"] in calls
                assert known != ("id" in piece), "the id comes with the first piece alone"
                assert known != ("name" in piece["function"])
                assert isinstance(piece["function"]["arguments"], str)
                call = calls.setdefault(piece["index"], {"arguments": ""})
                call |= {} if known else {"id": piece["id"], "name": piece["function"]["name"]}
                call["arguments"] += piece["function"]["arguments"]
        return calls


def read(lines: Iterator[str], into: Stream) -> None:
    """Reads server-sent events into ``into``; fails at a line that is neither a JSON event, nor
    [DONE], nor a comment."""
    for line in lines:
        assert not into.done or not line, "nothing follows [DONE]"
        if not line:
            continue
        if line.startswith(":"):
            into.comments.append(line)
        elif line == "data: [DONE]":
            into.done = True
        else:
            assert line.startswith("data: {"), line
            into.events.append(json.loads(line.removeprefix("data: ")))
            into.times.append(time.monotonic())


def stream_from(http: httpx.Client, path: str, asked: Json) -> Stream:
    """Sends a request with ``stream`` and reads the stream, also if it ends with an error. If the
    status is not 200, the error body is the only event."""
    with http.stream("POST", path, json=asked | {"stream": True}) as response:
        found = Stream(response.status_code)
        if response.status_code == 200:
            assert response.headers["content-type"].startswith("text/event-stream")
            read(response.iter_lines(), found)
        else:
            response.read()
            found.events.append(response.json())
    return found


def stream(server: Server, path: str, **fields: Any) -> Stream:
    return stream_from(server.http, path, body(server, path, **fields))


def whole_stream(server: Server, path: str, **fields: Any) -> Stream:
    """Sends a request with ``stream`` and reads the stream; fails if it ends with an error or
    without [DONE]."""
    found = stream(server, path, **fields)
    assert found.status == 200, found.events
    assert not found.errors
    assert found.done
    return found


def together(*calls: Any) -> list[Any]:
    """Runs functions at the same time, each in a thread; returns their results in order."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def tokenizer_of(server: Server) -> Tokenizer:
    return Tokenizer.from_file(str(server.folder / "tokenizer.json"))
