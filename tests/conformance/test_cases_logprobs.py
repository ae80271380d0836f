"""Log probabilities, each beside its token. docs/reported-faults.md lists the ids in test names."""

from __future__ import annotations

import re
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.utils import load_model
from transformers.convert_slow_tokenizer import bytes_to_unicode

from support.api_client import (
    CHAT,
    TEXT,
    Json,
    answer,
    choice,
    post,
    refused,
    tokenizer_of,
    whole_stream,
)
from support.server import Server

PROMPTS = ["Once upon a time", "def main():"]


def same(found: Json, wanted: Json) -> None:
    """Compares tokens, and log probabilities within the precision of floats."""
    assert found["tokens"] == wanted["tokens"]
    assert found["text_offset"] == wanted["text_offset"]
    assert found["token_logprobs"] == pytest.approx(wanted["token_logprobs"], abs=1e-4)
    for these, those in zip(found["top_logprobs"], wanted["top_logprobs"], strict=True):
        assert these == pytest.approx(those, abs=1e-4)


@pytest.mark.parametrize("n", [1, 3])
def test_R52_each_prompt_has_its_own(tiny: Server, n: int) -> None:
    asked: Json = {"logprobs": 2, "max_tokens": 4, "temperature": 1, "seed": 3, "n": n}
    both = answer(tiny, TEXT, prompt=PROMPTS, **asked)["choices"]
    assert [one["index"] for one in both] == list(range(2 * n))
    alone = [answer(tiny, TEXT, prompt=prompt, **asked)["choices"] for prompt in PROMPTS]
    for found, wanted in zip(both, [*alone[0], *alone[1]], strict=True):
        assert found["text"] == wanted["text"]
        assert len(found["logprobs"]["tokens"]) == 4
        assert all(len(values) == 4 for values in found["logprobs"].values())
        same(found["logprobs"], wanted["logprobs"])
    streamed = whole_stream(tiny, TEXT, prompt=PROMPTS, **asked)
    for index, wanted in enumerate(both):
        joined: dict[str, list[Any]] = {name: [] for name in wanted["logprobs"]}
        for part in streamed.of(index):
            for name, values in (part["logprobs"] or {}).items():
                joined[name] += values
        same(joined, wanted["logprobs"])


@pytest.mark.parametrize("n", [1, 3])
def test_R52_chats_have_theirs_streamed_or_not(tiny: Server, n: int) -> None:
    """Every token has one entry, also where its text is half a character or held back."""
    asked: Json = {
        **{"logprobs": True, "top_logprobs": 2, "n": n, "max_tokens": 16},
        **{"temperature": 2, "seed": 3, "stop": ["never in there"], "ignore_eos": True},
    }
    whole = answer(tiny, CHAT, **asked)["choices"]
    streamed = whole_stream(tiny, CHAT, **asked)
    for index, one in enumerate(whole):
        parts = [part["logprobs"]["content"] for part in streamed.of(index) if part["logprobs"]]
        joined = [token for part in parts for token in part]
        assert len(joined) == 16
        for found, wanted in zip(joined, one["logprobs"]["content"], strict=True):
            assert found["bytes"] == wanted["bytes"]
            assert found["logprob"] == pytest.approx(wanted["logprob"], abs=1e-4)
            assert len(found["top_logprobs"]) == 2


def test_R52_they_are_the_models_own(tiny: Server) -> None:
    """Against a forward pass of the same weights here; temperature and biases change nothing."""
    model, _ = load_model(tiny.folder)
    tokenizer = tokenizer_of(tiny)
    ids = tokenizer.encode(PROMPTS[0]).ids
    found = choice(
        tiny,
        TEXT,
        prompt=ids,
        logprobs=5,
        max_tokens=6,
        temperature=0.5,
        seed=1,
        logit_bias={"300": 3},
        frequency_penalty=1,
    )["logprobs"]
    for token, logprob, top in zip(
        found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
    ):
        wanted = nn.log_softmax(model(mx.array([ids]))[0, -1])
        id = tokenizer.token_to_id(stand_ins(token))
        assert logprob == pytest.approx(wanted[id].item(), abs=1e-3)
        likeliest = mx.sort(wanted)[-5:].tolist()
        assert sorted(top.values())[-5:] == pytest.approx(likeliest, abs=1e-3)
        assert top[token] == logprob
        ids.append(id)


def stand_ins(token: str) -> str:
    """Returns the characters by which a byte-level vocabulary writes the bytes of a completion's
    token."""
    named = re.fullmatch(r"bytes:((?:\\x[0-9a-f]{2})+)", token)
    raw = bytes.fromhex(named[1].replace("\\x", "")) if named else token.encode()
    return "".join(bytes_to_unicode()[byte] for byte in raw)


def test_R54_echo_with_logprobs_is_refused(tiny: Server) -> None:
    """Rather than to leave the prompt's out."""
    for logprobs in (0, 1, 5):
        for max_tokens in (0, 1):
            response = post(
                tiny, TEXT, prompt="ab", echo=True, logprobs=logprobs, max_tokens=max_tokens
            )
            assert refused(response, "logprobs")["code"] == "unsupported_parameter"
    assert choice(tiny, TEXT, prompt="ab", echo=False, logprobs=1)["logprobs"]
    assert choice(tiny, TEXT, prompt="ab", echo=True, logprobs=None)["logprobs"] is None
