"""The released ``openai`` package against a real server on a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from support.server import Server, serving


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tiny_model, tmp_path_factory.mktemp("serve")) as running:
        yield running


def streamed_chat(server: Server, **options: Any) -> tuple[str, Any, list[Any]]:
    chunks = list(
        server.client.chat.completions.create(
            model=server.model,
            messages=[{"role": "user", "content": "Tell me a story"}],
            stream=True,
            stream_options={"include_usage": True},
            **{"temperature": 0, "max_tokens": 12, **options},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    return text, chunks[-1].usage, chunks


def test_streamed_and_plain_chat_agree(server: Server) -> None:
    plain = server.chat(max_tokens=12)
    text, usage, chunks = streamed_chat(server)
    assert text == plain.choices[0].message.content != ""
    assert usage.completion_tokens == plain.usage.completion_tokens == 12
    assert usage.prompt_tokens == plain.usage.prompt_tokens
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len({c.id for c in chunks}) == len({c.created for c in chunks}) == 1
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"


def test_streamed_and_plain_completions_agree(server: Server) -> None:
    options: dict[str, Any] = {
        "model": server.model,
        "prompt": "Once upon a time",
        "temperature": 0,
        "max_tokens": 12,
    }
    plain = server.client.completions.create(**options)
    chunks = list(
        server.client.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(c.choices[0].text for c in chunks if c.choices)
    assert text == plain.choices[0].text != ""
    assert chunks[-1].usage == plain.usage
    assert plain.choices[0].finish_reason == "length"


def test_seeds_and_choices(server: Server) -> None:
    def texts(seed: int) -> list[str | None]:
        answer = server.chat(temperature=1.5, seed=seed, n=3, max_tokens=24)
        assert [c.index for c in answer.choices] == [0, 1, 2]
        return [c.message.content for c in answer.choices]

    first = texts(11)
    assert first == texts(11)
    assert len({*first, *texts(12), *texts(13)}) == 9


def test_models(server: Server) -> None:
    [model] = server.client.models.list().data
    assert model.id == server.model
    assert server.client.models.retrieve(model.id).id == model.id
    with pytest.raises(openai.NotFoundError):
        server.client.models.retrieve("nonsense")


def test_errors_arrive_as_the_clients_own(server: Server) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        server.chat(temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        server.client.chat.completions.create(
            model="nonsense", messages=[{"role": "user", "content": "hi"}]
        )


def test_logprobs(server: Server) -> None:
    answer = server.chat(logprobs=True, top_logprobs=3, max_tokens=4)
    content = answer.choices[0].logprobs.content
    assert len(content) == 4
    for token in content:
        assert token.top_logprobs[0].token == token.token  # greedy takes the likeliest
        assert token.logprob == token.top_logprobs[0].logprob <= 0
    joined = b"".join(bytes(t.bytes) for t in content)
    assert joined.decode("utf-8", "replace") == answer.choices[0].message.content
