"""Contents of a process's log, and texts that it never logs."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog
from structlog.contextvars import bound_contextvars

from mayfly_protocol.common import logs
from mayfly_protocol.common.logs import OURS, format_without_messages
from mayfly_protocol.settings import LogSettings
from mayfly_server.app import _log_unhandled
from mayfly_server.http.middleware import RequestId
from support.doubles.fake_node import FakeNode, answer_words
from support.running_front import RunningFront

SECRET = "the eagle lands at midnight"
Log = Callable[..., io.StringIO]


@pytest.fixture
def log() -> Iterator[Log]:
    """Configures logging into a buffer for a test, and puts everything back."""
    root = logging.getLogger()
    before = (root.level, root.handlers[:], [logging.getLogger(name).level for name in OURS])

    def configured(**always: Any) -> io.StringIO:
        stream = io.StringIO()
        fields = {name: always.pop(name) for name in ("form", "level", "prompts") if name in always}
        logs.configure(LogSettings(**{"form": "json", **fields}), stream, **always)
        return stream

    yield configured
    root.setLevel(before[0])
    root.handlers[:] = before[1]
    for name, level in zip(OURS, before[2], strict=True):
        logging.getLogger(name).setLevel(level)
    structlog.reset_defaults()


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def own(name: str = "mayfly_server.dispatch.relay") -> Any:
    return structlog.get_logger(name)


def fail() -> None:
    try:
        raise KeyError(SECRET)
    except KeyError as error:
        raise ValueError(f"{SECRET} is no number") from error


def test_S21_a_terminal_is_told_nothing_by_a_text(log: Log) -> None:
    stream = log(form="text")
    own().warning("model \x1b[31mred", name="a\nb\x9b2J", café="naïve Ω")
    [line] = stream.getvalue().splitlines()
    assert "model \\x1b[31mred" in line
    assert "a\\nb\\x9b2J" in line
    assert "naïve Ω" in line
    stream = log(form="text", prompts=True)
    try:
        raise ValueError("two\nlines\x1b[31m")
    except ValueError:
        own().exception("failed")
    assert "two\nlines\\x1b[31m" in stream.getvalue()


def test_a_line_is_an_object_that_says_who_and_when(log: Log) -> None:
    stream = log(slot="m-0", incarnation=3)
    with bound_contextvars(request_id="req_1"):
        own().warning("retrying on another worker", cause="lost")
    [line] = lines(stream)
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "event": "retrying on another worker",
        "level": "warning",
        "logger": "mayfly_server.dispatch.relay",
        "request_id": "req_1",
        "slot": "m-0",
        "incarnation": 3,
        "cause": "lost",
    }


def test_what_a_line_says_itself_goes_first(log: Log) -> None:
    stream = log(incarnation=3)
    own().info("worker lost", incarnation=2)
    assert lines(stream)[0]["incarnation"] == 2


def test_plain_loggers_are_lines_of_the_same_kind(log: Log) -> None:
    stream = log(slot="m-0")
    logging.getLogger("mayfly_reaper.node").warning("dropped %d", 7, extra={"peer": "x"})
    [line] = lines(stream)
    assert (line["event"], line["level"], line["slot"]) == ("dropped 7", "warning", "m-0")
    assert line["peer"] == "x"


def test_text_is_for_people(log: Log) -> None:
    stream = log(form="text")
    own().info("retrying on another worker", cause="lost")
    [line] = stream.getvalue().splitlines()
    assert "retrying on another worker" in line and "cause=lost" in line and "\x1b" not in line


@pytest.mark.parametrize(("level", "count"), [("debug", 4), ("info", 3), ("error", 1)])
def test_levels(log: Log, level: str, count: int) -> None:
    stream = log(level=level)
    for tell in (own().debug, own().info, own().warning, own().error):
        tell("a line")
    assert len(lines(stream)) == count


def test_libraries_speak_from_warning_on(log: Log) -> None:
    stream = log(level="debug")
    logging.getLogger("httpx").info("a request with everything in it")
    logging.getLogger("httpx").warning("odd")
    assert [line["event"] for line in lines(stream)] == ["odd"]


@pytest.mark.parametrize("name", ["rid", "request_id"])
@pytest.mark.parametrize("form", ["json", "text"])
def test_an_exception_of_a_request_is_told_without_its_words(
    log: Log, name: str, form: str
) -> None:
    stream = log(form=form, level="debug")
    try:
        fail()
    except ValueError:
        own().exception("unhandled exception", **{name: "r1"})
    text = stream.getvalue()
    assert SECRET not in text
    for part in ("KeyError", "ValueError", "in fail", "test_logs.py", "direct cause"):
        assert part in text


def test_one_of_a_library_too(log: Log) -> None:
    stream = log()
    try:
        fail()
    except ValueError as error:
        logging.getLogger("uvicorn.error").error("Exception", exc_info=error)
    assert SECRET not in stream.getvalue()
    assert "ValueError" in lines(stream)[0]["exception"]


def test_one_that_is_about_no_request_is_told_in_full(log: Log) -> None:
    stream = log()
    try:
        fail()
    except ValueError as error:
        own().error("loading failed", exc_info=error)
    assert lines(stream)[0]["exception"].endswith(f"ValueError: {SECRET} is no number")


def test_who_wants_prompts_gets_the_words(log: Log) -> None:
    stream = log(prompts=True)
    try:
        fail()
    except ValueError:
        own().exception("unhandled exception", rid="r1")
    assert SECRET in lines(stream)[0]["exception"]


def test_exceptions_that_cause_each_other_end() -> None:
    one, two = ValueError(SECRET), KeyError(SECRET)
    one.__cause__, two.__context__ = two, one
    told = format_without_messages(one)
    assert told.index("KeyError") < told.index("ValueError")
    assert SECRET not in told


def test_a_suppressed_context_is_not_told() -> None:
    one = ValueError()
    one.__context__ = KeyError()
    one.__suppress_context__ = True
    assert "KeyError" not in format_without_messages(one)


async def test_what_asyncio_finds_is_told_without_words(log: Log) -> None:
    stream = log(level="debug")
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_log_unhandled)
    try:
        loop.call_soon(lambda text: int(text), SECRET)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    finally:
        loop.set_exception_handler(None)
    assert SECRET not in stream.getvalue()
    assert "ValueError" in lines(stream)[0]["exception"]


@pytest.mark.parametrize("wanted", [False, True])
def test_what_is_asked_is_logged_where_that_is_wanted(log: Log, wanted: bool) -> None:
    stream = log(level="debug", prompts=wanted)
    with FakeNode() as node:
        node.worker(answer_words())
        with RunningFront(node.control, logs=LogSettings(prompts=wanted)) as front:
            for path, asked in (
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": SECRET}]}),
                ("/v1/completions", {"model": "tiny", "prompt": SECRET}),
            ):
                answer = front.client.post(path, json=asked, headers={"x-request-id": "my-own"})
                assert answer.status_code == 200
    said = [line for line in lines(stream) if SECRET in json.dumps(line)]
    assert len(said) == (2 if wanted else 0)
    for line in said:
        assert (line["event"], line["request_id"]) == ("request submitted to a worker", "my-own")
        assert {"rid", "slot", "incarnation"} <= line.keys()


async def test_an_error_that_nobody_foresaw_has_its_requests_id(log: Log) -> None:
    stream = log(level="debug")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError(SECRET)

    scope = {"type": "http", "path": "/", "headers": [(b"x-request-id", b"my-own")]}
    with pytest.raises(ValueError, match="eagle"):
        await RequestId(app)(scope, None, None)  # type: ignore[arg-type]
    [line] = lines(stream)
    assert (line["level"], line["request_id"]) == ("error", "my-own")
    assert "ValueError" in line["exception"] and SECRET not in line["exception"]
