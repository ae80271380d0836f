"""``mayfly chat``: parsing of streams, and whole chats against a small HTTP server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from mayfly_cli.app import app
from mayfly_cli.commands.chat import AnswerFailed, deltas
from mayfly_cli.commands.client import events


def chunk(**delta: str) -> str:
    return json.dumps({"choices": [{"index": 0, "delta": delta}]})


def test_events_are_parsed_as_the_standard_says() -> None:
    lines = [
        ": waiting",
        "",
        "data: one",
        "",
        "event: message",
        "data:two",
        "data:  three",
        "id: 7",
        "",
        "data",
        "",
        "data: cut off by the stream's end",
    ]
    assert list(events(lines)) == ["one", "two\n three", ""]


@given(st.lists(st.lists(st.text(st.characters(exclude_characters="\r\n")), min_size=1)))
def test_what_was_sent_as_events_is_read_back(sent: list[list[str]]) -> None:
    lines = [line for event in sent for line in (*(f"data: {part}" for part in event), "")]
    assert list(events(lines)) == ["\n".join(event) for event in sent]


def test_deltas_end_at_done() -> None:
    stream = [chunk(role="assistant"), chunk(content="Par"), '{"choices": []}', "[DONE]", "x"]
    assert list(deltas(stream)) == [{"role": "assistant"}, {"content": "Par"}]


def test_an_answer_without_its_done_broke_off() -> None:
    reading = deltas([chunk(content="Par")])
    assert next(reading) == {"content": "Par"}
    with pytest.raises(AnswerFailed, match="broke off"):
        next(reading)


def test_an_error_in_the_stream_is_told() -> None:
    with pytest.raises(AnswerFailed, match=r"^the worker died$"):
        list(deltas(['{"error": {"message": "the worker died"}}']))


@pytest.mark.parametrize("data", ["nonsense", "[]", "7", '{"choices": [{}]}'])
def test_what_is_no_chunk_is_quoted(data: str) -> None:
    with pytest.raises(AnswerFailed) as raised:
        list(deltas([data]))
    assert data in str(raised.value)


class FakeChatServer(BaseHTTPRequestHandler):
    """Answers like an OpenAI-compatible server, with the replies that a test lays ready."""

    replies: ClassVar[list[tuple[int, str]]] = []
    asked: ClassVar[list[dict[str, Any]]] = []
    models: ClassVar[list[dict[str, str]]] = []

    def do_GET(self) -> None:
        self._send(200, json.dumps({"object": "list", "data": self.models}))

    def do_POST(self) -> None:
        self.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self._send(*self.replies.pop(0))

    def _send(self, status: int, body: str) -> None:
        content = body.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving(*replies: tuple[int, str], models: tuple[str, ...] = ("smol",)) -> Iterator[str]:
    FakeChatServer.replies = list(replies)
    FakeChatServer.asked = []
    FakeChatServer.models = [{"id": name} for name in models]
    with ThreadingHTTPServer(("127.0.0.1", 0), FakeChatServer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def stream(*texts: str) -> tuple[int, str]:
    sent = [": hold on", *(f"data: {chunk(content=text)}" for text in texts), "data: [DONE]"]
    return 200, "\n\n".join(sent) + "\n\n"


def test_a_conversation_keeps_its_history() -> None:
    with serving(stream("Par", "is."), stream("Two million.")) as url:
        result = CliRunner().invoke(app, ["chat", "--url", url], input="Capital?\n\nHow big?\n")
    assert result.exit_code == 0
    assert "Paris.\n" in result.output
    assert "Two million.\n" in result.output
    first, second = FakeChatServer.asked
    assert first["model"] == "smol"
    assert first["temperature"] == 0
    assert first["messages"] == [{"role": "user", "content": "Capital?"}]
    assert second["messages"] == [
        {"role": "user", "content": "Capital?"},
        {"role": "assistant", "content": "Paris."},
        {"role": "user", "content": "How big?"},
    ]


def test_a_refused_message_is_explained_and_forgotten() -> None:
    refused = 400, json.dumps({"error": {"message": "too long for the context"}})
    broken = 502, "<html>"
    with serving(refused, broken, stream("Yes.")) as url:
        result = CliRunner().invoke(
            app,
            ["chat", "--url", url, "--model", "other", "--temperature", "0.5"],
            input="one\ntwo\nthree\n",
        )
    assert result.exit_code == 0
    assert "too long for the context" in result.stderr
    assert "HTTP 502" in result.stderr
    assert FakeChatServer.asked[-1]["model"] == "other"
    assert FakeChatServer.asked[-1]["temperature"] == 0.5
    assert FakeChatServer.asked[-1]["messages"] == [{"role": "user", "content": "three"}]


def test_no_model_is_said() -> None:
    with serving(models=()) as url:
        result = CliRunner().invoke(app, ["chat", "--url", url])
    assert result.exit_code == 1
    assert "serves no model right now" in result.stderr


def test_no_server_is_said() -> None:
    with serving() as url:
        pass
    result = CliRunner().invoke(app, ["chat", "--url", url])
    assert result.exit_code == 1
    assert f"no server answers at {url}" in result.stderr
