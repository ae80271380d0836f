"""Abandoned requests, and storms of them, on a whole server.

docs/reported-faults.md lists the ids in test names.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from conformance.conftest import SLOW_PREFILL_TOKEN_S, SLOW_STEP_S
from support.api_client import CHAT, Json, answer, body, choice, post, together, user, whole_stream
from support.models.scripted import ModelFault, ScriptedReply
from support.scripted_answers import CHARACTERS, NEVER_ENDING
from support.server import Server, serving, wait_for

SOON_S = 10.0
"""Seconds for which a worker may go on with a request that was given up, and for which status
pages may lag behind."""
ENDLESS: Json = {"messages": [user("[on and on]")], "max_tokens": 3000}


def requests_of(server: Server) -> tuple[int, int]:
    """Running and waiting, as the worker says."""
    slot = server.slot()
    return slot["running"], slot["waiting"]


def front_end_running(server: Server) -> float:
    lines = server.http.get("/metrics").text.splitlines()
    found = [line.split()[-1] for line in lines if line.startswith("mayfly_num_requests_")]
    return sum(map(float, found))


def assert_idle_soon(server: Server) -> None:
    """Checks that nothing runs or waits, and that no token is generated any more."""
    wait_for(
        lambda: requests_of(server) == (0, 0) and front_end_running(server) == 0,
        "an idle server",
        SOON_S,
    )


@contextlib.contextmanager
def given_up(server: Server, asked: Json) -> Iterator[http.client.HTTPConnection]:
    """A request whose client closes its connection at the end of the block."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    headers = {"content-type": "application/json"}
    try:
        connection.request("POST", CHAT, json.dumps(body(server, CHAT, **asked)), headers)
        yield connection
    finally:
        connection.close()


def read_until(response: http.client.HTTPResponse, part: bytes) -> None:
    while part not in (line := response.readline()):
        assert line, "the stream has ended"


def assert_answers_at_once(server: Server) -> None:
    begin = time.monotonic()
    assert choice(server, CHAT, messages=[user("[text]")])["text"] == "Just text."
    assert time.monotonic() - begin < SOON_S


def words(count: int) -> str:
    """Text of about so many tokens."""
    return "a long question " * (count // 4)


@pytest.mark.parametrize("streamed", [True, False])
def test_R70_an_answer_that_nobody_reads_is_not_written(slow: Server, streamed: bool) -> None:
    with given_up(slow, {**ENDLESS, "stream": streamed}) as connection:
        wait_for(lambda: requests_of(slow) == (1, 0), "the request to run")
        if streamed:
            read_until(connection.getresponse(), b"data:")
    assert_idle_soon(slow)
    drawn = slow.slot()["generated_tokens"]
    assert_answers_at_once(slow)
    # What was drawn meanwhile is that answer, and not 20 tokens a second of the other.
    wait_for(lambda: slow.slot()["generated_tokens"] > drawn, "the count of tokens")
    assert slow.slot()["generated_tokens"] - drawn <= 8


CLIENT = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[1], sys.argv[2].encode(),
                                 {"content-type": "application/json"})
urllib.request.urlopen(request).read()
"""


@pytest.mark.parametrize("streamed", [False, True])
def test_R71_a_killed_client_is_no_longer_in_flight(slow: Server, streamed: bool) -> None:
    asked = json.dumps(body(slow, CHAT, **ENDLESS, stream=streamed))
    client = subprocess.Popen([sys.executable, "-c", CLIENT, f"{slow.url}{CHAT}", asked])
    try:
        wait_for(
            lambda: requests_of(slow) == (1, 0) and front_end_running(slow) == 1,
            "the request to run",
        )
    finally:
        client.kill()
        client.wait()
    assert_idle_soon(slow)


def test_R73_retries_do_not_pile_up_in_front_of_a_patient_request(slow: Server) -> None:
    tokens = 600

    def prefill(text: str) -> Json:
        return {"messages": [user(f"{text} {words(tokens)} [text]")]}

    begin = time.monotonic()
    used = answer(slow, CHAT, **prefill("calm"))["usage"]
    alone_s = time.monotonic() - begin
    assert used["prompt_tokens"] > tokens
    assert alone_s > tokens * SLOW_PREFILL_TOKEN_S
    impatient = httpx.Client(base_url=slow.url, timeout=0.4)
    for _ in range(5):
        with pytest.raises(httpx.ReadTimeout):
            impatient.post(CHAT, json=body(slow, CHAT, **prefill("storm")))
    impatient.close()
    begin = time.monotonic()
    assert choice(slow, CHAT, **prefill("storm"))["text"] == "Just text."
    chunk_s = 1.0
    assert time.monotonic() - begin < alone_s + chunk_s + 4.0


@pytest.mark.parametrize("gone", ["long", "short"])
def test_R74_a_row_that_is_cancelled_in_prefill_leaves(slow: Server, gone: str) -> None:
    """The other one, be it in prefill too or decoding, is not disturbed."""
    long = {"messages": [user(f"{gone} {words(250)} [characters]")], "max_tokens": 200}
    short = {"messages": [user(f"{gone} {words(100)} [characters]")], "max_tokens": 200}
    survivor, cancelled = (short, long) if gone == "long" else (long, short)
    cancelled = {
        "messages": [user(cancelled["messages"][0]["content"].replace("characters", "on and on"))],
        "max_tokens": 3000,  # it would not end by itself
    }
    found: list[str] = []

    def survive() -> None:
        found.append(whole_stream(slow, CHAT, **survivor).text())

    other = threading.Thread(target=survive)
    with given_up(slow, {**cancelled, "stream": True}):
        other.start()
        wait_for(lambda: sum(requests_of(slow)) == 2, "both requests")
    wait_for(lambda: sum(requests_of(slow)) <= 1, "one to leave", SOON_S)
    other.join(30)
    assert found == [CHARACTERS]
    assert_idle_soon(slow)


@pytest.mark.parametrize("turns", [20, pytest.param(100, marks=pytest.mark.long)])
def test_R77_identical_cached_requests_at_the_same_instant(
    tiny_model: Path, tmp_path: Path, turns: int
) -> None:
    with serving(tiny_model, tmp_path) as server:
        asked: Json = {"messages": [user(words(600))], "max_tokens": 1}
        first = answer(server, CHAT, **asked)
        for turn in range(turns):
            if turn % 2:
                with given_up(server, {**asked, "stream": turn % 4 == 1}):
                    same = answer(server, CHAT, **asked)
            else:
                same, twin = together(*[partial(answer, server, CHAT, **asked)] * 2)
                assert twin["choices"] == first["choices"]
            assert same["choices"] == first["choices"]
            used = same["usage"]
            assert used["prompt_tokens_details"]["cached_tokens"] == used["prompt_tokens"] - 1
        assert_idle_soon(server)
        begin = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - begin < 15.0


def test_R80_what_ends_the_text_ends_the_work(slow: Server) -> None:
    whole = choice(slow, CHAT, **{**ENDLESS, "max_tokens": 6})["text"]
    assert NEVER_ENDING.startswith(whole)
    stop = whole.split()[2]
    drawn = slow.slot()["generated_tokens"]
    begin = time.monotonic()
    found = answer(slow, CHAT, **{**ENDLESS, "stop": [stop]})
    assert found["choices"][0]["finish_reason"] == "stop"
    text, tokens = found["choices"][0]["message"]["content"], found["usage"]["completion_tokens"]
    assert text == whole[: whole.index(stop)]
    cut = choice(slow, CHAT, **{**ENDLESS, "max_tokens": tokens})["text"]
    assert cut.startswith(text + stop), "usage ends with the token that completes the stop"
    assert time.monotonic() - begin < SOON_S + 3 * tokens * SLOW_STEP_S
    assert_idle_soon(slow)
    assert slow.slot()["generated_tokens"] - drawn <= 2 * tokens + 6 + 4


def test_R80_a_stream_that_is_closed_at_its_first_tool_call(slow: Server) -> None:
    tool = {"type": "function", "function": {"name": "sum", "parameters": {"type": "object"}}}
    asked: Json = {"messages": [user("[two calls]")], "tools": [tool], "max_tokens": 3000}
    with given_up(slow, {**asked, "stream": True}) as connection:
        read_until(connection.getresponse(), b"tool_calls")
    assert_idle_soon(slow)


def storm(server: Server, seconds: float) -> tuple[list[int], list[int]]:
    """Twelve clients that give up after a second and try again, and heartbeats of one token that
    do not; the statuses that each got."""
    until = time.monotonic() + seconds
    impatient: list[int] = []
    beats: list[int] = []

    def retry() -> None:
        with httpx.Client(base_url=server.url, timeout=1.0) as client:
            while time.monotonic() < until:
                with contextlib.suppress(httpx.TimeoutException):
                    asked = body(server, CHAT, **{**ENDLESS, "max_tokens": 100})
                    impatient.append(client.post(CHAT, json=asked).status_code)

    def beat() -> None:
        while time.monotonic() < until:
            begin = time.monotonic()
            beats.append(post(server, CHAT, max_tokens=1).status_code)
            time.sleep(max(0.0, begin + 1 / 3 - time.monotonic()))

    workers: list[Callable[[], None]] = [retry] * 12 + [beat]
    together(*workers)
    return impatient, beats


@pytest.mark.parametrize("seconds", [5, pytest.param(60, marks=pytest.mark.long)])
def test_R99_a_storm_of_retries_leaves_nothing_behind(slow: Server, seconds: int) -> None:
    impatient, beats = storm(slow, seconds)
    assert set(beats) <= {200, 429, 503}
    assert set(impatient) <= {429, 503}
    assert len(beats) >= seconds
    assert_answers_at_once(slow)
    assert_idle_soon(slow)


SHAPES = "[broadcast_shapes] Shapes (1,2) and (3,4) cannot be broadcast."


def test_R84_a_request_that_breaks_its_prefill_breaks_no_other(
    scripted_model: Callable[..., Path], tmp_path: Path
) -> None:
    fine = "fine " * 30
    broken = ScriptedReply("[broken]", "never", faults=[ModelFault("prefill", "raise", SHAPES)])
    model = scripted_model([broken, ScriptedReply("[fine]", fine)], step_s=0.01)
    with serving(model, tmp_path, "--trust-remote-code") as server:

        def break_it() -> httpx.Response:
            return post(server, CHAT, messages=[user("[broken]")], max_tokens=80)

        def good() -> str:
            found: str = choice(server, CHAT, messages=[user("[fine]")], max_tokens=80)["text"]
            return found

        begin = time.monotonic()
        failed = [break_it()]
        assert time.monotonic() - begin < 10.0
        for _ in range(2):
            text, response = together(good, break_it)
            assert text == fine
            failed.append(response)
        for response in failed:
            assert response.status_code == 500
            assert response.headers["x-should-retry"] == "false"
            assert response.json()["error"]["code"] == "shape"
        assert_idle_soon(server)
        assert good() == fine
