"""The demo model, served as a newcomer serves it and asked through the ``openai`` package.

Where there is a shared OpenBLAS it is preloaded, as it would be for the newcomer.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.server import Server, serving

pytestmark = pytest.mark.demo

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def server(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(demo_model, tmp_path_factory.mktemp("serve"), "--preload-blas") as running:
        yield running


def counted(usage: Any) -> tuple[int, int, int]:
    """Usage without what came from the prefix cache, which the second request has more of."""
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


def test_the_capital_of_france_plain_and_streamed(server: Server) -> None:
    ask = {"model": server.model, "messages": QUESTION, "temperature": 0, "max_tokens": 32}
    plain = server.client.chat.completions.create(**ask)
    [choice] = plain.choices
    assert "Paris" in choice.message.content
    assert choice.finish_reason == "stop"

    stream = server.client.chat.completions.create(
        **ask, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    pieces = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(pieces) == choice.message.content
    assert sum(map(bool, pieces)) > 1  # in more than one piece
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert counted(chunks[-1].usage) == counted(plain.usage)


def test_a_completion_plain_and_streamed(server: Server) -> None:
    ask = {"model": server.model, "prompt": "The capital of France is", "temperature": 0}
    plain = server.client.completions.create(**ask, max_tokens=8)
    stream = server.client.completions.create(
        **ask, max_tokens=8, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "Paris" in plain.choices[0].text
    assert "".join(c.choices[0].text for c in chunks if c.choices) == plain.choices[0].text
    assert counted(chunks[-1].usage) == counted(plain.usage)
    assert plain.usage.completion_tokens == 8
