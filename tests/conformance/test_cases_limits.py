"""Ends of answers (stop strings, token limits) and the reported finish reason.
docs/reported-faults.md lists the ids in test names."""

from __future__ import annotations

import codecs
from functools import partial
from itertools import accumulate
from typing import Any

import pytest

from conformance.conftest import FUSSY_CONTEXT
from support.api_client import (
    CHAT,
    PATHS,
    TEXT,
    Json,
    answer,
    choice,
    post,
    refused,
    stream,
    together,
    user,
    whole_stream,
)
from support.scripted_answers import NEVER_ENDING
from support.server import Server

both_routes = pytest.mark.parametrize("path", PATHS)


def long_prompt(path: str, words: int = 16) -> Json:
    """About a hundred tokens that :func:`fussy` answers without end."""
    text = "a long question " * words
    return {"messages": [user(f"{text}[on and on]")]} if path == CHAT else {"prompt": text}


@both_routes
@pytest.mark.parametrize("max_tokens", [None, 10**9])
def test_R24_the_budget_is_what_the_context_leaves(
    fussy: Server, path: str, max_tokens: int | None
) -> None:
    found = answer(fussy, path, **long_prompt(path), max_tokens=max_tokens)
    used = found["usage"]
    assert 80 < used["prompt_tokens"] < FUSSY_CONTEXT
    assert (
        used["total_tokens"] == used["prompt_tokens"] + used["completion_tokens"] == FUSSY_CONTEXT
    )
    assert found["choices"][0]["finish_reason"] == "length"


@both_routes
def test_R24_a_budget_that_was_given(fussy: Server, path: str) -> None:
    found = answer(fussy, path, **long_prompt(path), max_tokens=5)
    assert found["usage"]["completion_tokens"] == 5
    assert found["choices"][0]["finish_reason"] == "length"


@both_routes
@pytest.mark.parametrize("streamed", [False, True])
def test_R24_a_prompt_that_leaves_no_room(fussy: Server, path: str, streamed: bool) -> None:
    response = post(fussy, path, **long_prompt(path, words=40), stream=streamed)
    error = refused(response, "messages" if path == CHAT else "prompt")
    assert error["code"] == "context_length_exceeded"
    assert str(FUSSY_CONTEXT) in error["message"]


def lengths(server: Server, path: str) -> list[tuple[str, int]]:
    """The finish reason and the tokens of the same request, whole and streamed."""
    asked: Json = {"max_tokens": 3, "n": 2}
    whole = answer(server, path, **asked)
    found = [
        (one["finish_reason"], whole["usage"]["completion_tokens"]) for one in whole["choices"]
    ]
    streamed = whole_stream(server, path, **asked, stream_options={"include_usage": True})
    assert streamed.usage is not None
    tokens = streamed.usage["completion_tokens"]
    return [*found, *((streamed.finish(index), tokens) for index in (0, 1))]


@both_routes
def test_R26_length_is_said_everywhere(tiny: Server, path: str) -> None:
    wanted = [("length", 6)] * 4
    assert lengths(tiny, path) == wanted
    assert together(*[partial(lengths, tiny, path)] * 4) == [wanted] * 4


def test_R27_a_lack_of_memory_is_no_length(script: Server) -> None:
    """A fault in the middle of an answer: it goes on as if nothing had happened, or it fails."""
    found = whole_stream(script, CHAT, messages=[user("[short of memory once]")], max_tokens=20)
    assert (found.text(), found.finish()) == ("I have enough now.", "stop")
    asked: Json = {"messages": [user("[short of memory]")], "max_tokens": 20}
    failed = stream(script, CHAT, **asked)
    assert failed.errors and not failed.done
    assert all(c["finish_reason"] is None for c in failed.of(0))
    assert post(script, CHAT, **asked).status_code >= 500
    assert choice(script, CHAT, messages=[user("[text]")])["text"] == "Just text."


@pytest.mark.parametrize(
    ("path", "field"),
    [(CHAT, "max_tokens"), (CHAT, "max_completion_tokens"), (TEXT, "max_tokens")],
)
@pytest.mark.parametrize("bad", [-1, -(10**12), 0, 1.5, 8.0, "8", True, [8], 10**30])
def test_R28_budgets_that_are_none(tiny: Server, path: str, field: str, bad: Any) -> None:
    asked = {"prompt": "hi"} if path == TEXT else {"messages": [user("hi")]}
    refused(tiny.post(path, {**asked, field: bad}), None if bad == 10**30 else field)


@both_routes
def test_R28_a_huge_budget_is_what_the_context_leaves(fussy: Server, path: str) -> None:
    for huge in (10**12, 2**63 - 1):
        used = answer(fussy, path, **long_prompt(path), max_tokens=huge)["usage"]
        assert used["total_tokens"] == FUSSY_CONTEXT


class UndisturbedAnswer:
    """An answer without stops: its whole text, and where its tokens end in it."""

    def __init__(self, server: Server, path: str) -> None:
        self.server, self.path = server, path
        self.asked: Json = {"max_tokens": 40}
        found = choice(server, path, **self.asked, logprobs=True if path == CHAT else 0)
        self.text = found["text"]
        if path == TEXT:
            self.borders = list(found["logprobs"]["text_offset"])
        else:
            tokens = [bytes(token["bytes"]) for token in found["logprobs"]["content"]]
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            self.borders = [0, *accumulate(len(decoder.decode(token)) for token in tokens)]
        assert len(self.borders) >= 40

    def stopped_by(self, *stops: str) -> None:
        """The text ends before the stop that is complete first (the longest of those that end
        together), and nothing of it was ever sent."""
        found = [(self.text.find(stop), stop) for stop in stops if stop in self.text]
        at, _ = min(found, key=lambda one: (one[0] + len(one[1]), one[0]))
        fields = {**self.asked, "stop": list(stops)}
        whole = choice(self.server, self.path, **fields)
        streamed = whole_stream(self.server, self.path, **fields)
        for text, reason in (
            (whole["text"], whole["finish_reason"]),
            (streamed.text(), streamed.finish()),
        ):
            assert (text, reason) == (self.text[:at], "stop"), stops


@both_routes
def test_R29_stops_are_found_wherever_tokens_end(tiny: Server, path: str) -> None:
    found = UndisturbedAnswer(tiny, path)
    text, borders = found.text, found.borders
    for border in borders[3:20:4]:
        found.stopped_by(text[border - 2 : border + 2])
    longest = max(range(1, len(borders)), key=lambda i: borders[i] - borders[i - 1])
    found.stopped_by(text[borders[longest - 1] + 1 : borders[longest] - 1])
    found.stopped_by(text[:3])
    found.stopped_by(text[borders[4] - 1 : borders[8] + 1])
    found.stopped_by(text[borders[6] : borders[7] + 3], text[borders[6] : borders[7]])
    found.stopped_by(
        text[borders[9] : borders[12]], "never in there", text[borders[10] : borders[11]]
    )


@both_routes
@pytest.mark.parametrize("bad", ["", [""], ["", "zz"], ["a"] * 65, [5], [None], {}])
def test_R31_stops_that_are_none(tiny: Server, path: str, bad: Any) -> None:
    response = post(tiny, path, stop=bad)
    param = response.json()["error"]["param"]
    assert param.partition("[")[0] == "stop"
    refused(response, param)


@both_routes
def test_R31_no_stops_at_all(tiny: Server, path: str) -> None:
    plain = choice(tiny, path)
    for none in ([], None, ["never in there"], "never in there"):
        found = choice(tiny, path, stop=none)
        assert (found["text"], found["finish_reason"]) == (plain["text"], "length")


def test_a_stop_may_end_what_would_not(script: Server) -> None:
    found = choice(
        script, CHAT, messages=[user("[on and on]")], stop="on and on and", max_tokens=None
    )
    assert found["text"] == NEVER_ENDING[: NEVER_ENDING.find("on and on and")]
