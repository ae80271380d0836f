"""Prompts and answers that do not fit into the context. docs/reported-faults.md lists the ids in
test names."""

from __future__ import annotations

from typing import Any

import pytest

from conformance.conftest import FUSSY_CONTEXT
from support.api_client import CHAT, PATHS, post, refused, tokens, user, whole_stream
from support.server import Server, wait_for

both_routes = pytest.mark.parametrize("path", PATHS)


def prompt_of(server: Server, path: str, length: int) -> dict[str, Any]:
    """A prompt of exactly so many tokens."""

    def asked(text: str) -> dict[str, Any]:
        return {"messages": [user(text)]} if path == CHAT else {"prompt": text}

    start = len(tokens(server, **asked("a")))
    text = "a" + " a" * (length - start)
    assert len(tokens(server, **asked(text))) == length
    return asked(text)


@both_routes
@pytest.mark.parametrize("streamed", [False, True])
def test_R119_R120_prompts_beyond_the_context(fussy: Server, path: str, streamed: bool) -> None:
    """The last that fits has room for one token. What does not fit is refused before anything is
    computed, and before a stream begins."""

    def fits() -> None:
        asked = {**prompt_of(fussy, path, FUSSY_CONTEXT - 1), "max_tokens": 1}
        if streamed:
            assert whole_stream(fussy, path, **asked).finish() == "length"
        else:
            assert post(fussy, path, **asked).json()["usage"]["completion_tokens"] == 1

    computed = counted(fussy)
    fits()
    for length in (FUSSY_CONTEXT, FUSSY_CONTEXT + 1, 5000):
        response = post(fussy, path, **prompt_of(fussy, path, length), stream=streamed)
        error = refused(response, "messages" if path == CHAT else "prompt")
        assert error["code"] == "context_length_exceeded"
        said = f"This model's maximum context length is {FUSSY_CONTEXT} tokens. However, you"
        assert error["message"].startswith(said)
        assert f"{length} " in error["message"]
    fits()
    wait_for(lambda: fussy.slot()["generated_tokens"] == computed + 2, "two tokens, and no more")


def counted(server: Server) -> int:
    """The tokens that a worker has generated: it tells of them twice a second."""
    before = server.slot()["generated_tokens"]
    server.chat(max_tokens=1)
    wait_for(lambda: server.slot()["generated_tokens"] > before, "a count")
    return int(server.slot()["generated_tokens"])


@both_routes
def test_R119_an_answer_ends_with_the_context(fussy: Server, path: str) -> None:
    """Prompt 100 and 100 tokens more, of 128: the answer ends there, and says so."""
    response = post(fussy, path, **prompt_of(fussy, path, 100), max_tokens=100, ignore_eos=True)
    answer = response.json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == FUSSY_CONTEXT
