"""Log probabilities, each beside its token. docs/reported-faults.md lists the ids in test names."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.utils import load_model
from numpy.typing import NDArray
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
    user,
    whole_stream,
)
from support.server import Server

Floats = NDArray[np.float32]
Scored = Callable[[list[int]], Floats]
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


@pytest.fixture(scope="module")
def scored(tiny: Server) -> Scored:
    """Returns log probabilities of the token after each of the ids, shape [ids, vocabulary], by a
    forward pass of the same weights here."""
    model, _ = load_model(tiny.folder)
    return lambda ids: np.array(nn.log_softmax(model(mx.array([ids]))[0].astype(mx.float32)))


def long_prompt(tiny: Server, tokens: int) -> list[int]:
    rng = random.Random(tokens)
    return [rng.randrange(1, tokenizer_of(tiny).get_vocab_size()) for _ in range(tokens)]


@pytest.mark.parametrize("logprobs", [0, 5])
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_R54_an_echo_has_the_prompts_own(
    tiny: Server, scored: Scored, logprobs: int, max_tokens: int
) -> None:
    prompts = [long_prompt(tiny, length) for length in (300, 1, 40, 41)]
    asked = {"echo": True, "logprobs": logprobs, "max_tokens": max_tokens, "temperature": 0}
    whole = answer(tiny, TEXT, prompt=prompts, ignore_eos=True, **asked)
    streamed = whole_stream(tiny, TEXT, prompt=prompts, ignore_eos=True, **asked)
    assert whole["usage"]["completion_tokens"] == max_tokens * len(prompts)
    for index, (ids, one) in enumerate(zip(prompts, whole["choices"], strict=True)):
        found = one["logprobs"]
        assert one["finish_reason"] == "length"
        assert {len(values) for values in found.values()} == {len(ids) + max_tokens}
        assert found["token_logprobs"][0] is None
        assert found["top_logprobs"][0] is None
        wanted = scored(ids)
        for at in range(1, len(ids)):
            top = found["top_logprobs"][at]
            logprob = wanted[at - 1, ids[at]]
            assert found["token_logprobs"][at] == pytest.approx(logprob, abs=1e-4)
            assert top[found["tokens"][at]] == found["token_logprobs"][at]
            if logprobs:
                likeliest = wanted[at - 1].max()
                assert max(top.values()) == pytest.approx(likeliest, abs=1e-4)
        joined: dict[str, list[Any]] = {name: [] for name in found}
        for part in streamed.of(index):
            for name, values in (part["logprobs"] or {}).items():
                joined[name] += values
        assert streamed.text(index) == one["text"]
        same(joined, found)


def same_scores(found: list[Json | None], ids: list[int], wanted: Floats, asked: int) -> None:
    assert len(found) == len(ids)
    assert found[0] is None
    for at, each in enumerate(found[1:], start=1):
        assert each is not None
        row = wanted[at - 1]
        own = each[str(ids[at])]
        assert own["logprob"] == pytest.approx(row[ids[at]], abs=1e-4)
        higher = (row > row[ids[at]]).sum()
        assert abs(own["rank"] - higher - 1) <= 1  # floats that are as good as equal
        likeliest = sorted(each.values(), key=lambda one: one["rank"])[:asked]
        assert [one["rank"] for one in likeliest] == list(range(1, asked + 1))
        best = np.sort(row)[::-1][:asked].tolist()
        assert [one["logprob"] for one in likeliest] == pytest.approx(best, abs=1e-4)
        assert len(each) in (asked, asked + 1)


@pytest.mark.parametrize("asked", [0, 3])
def test_a_prompts_log_probabilities_in_vllms_form(
    tiny: Server, scored: Scored, asked: int
) -> None:
    ids = long_prompt(tiny, 300)
    wanted = scored(ids)
    found = answer(tiny, TEXT, prompt=ids, prompt_logprobs=asked, max_tokens=2, n=2, temperature=1)
    for one in found["choices"]:
        same_scores(one["prompt_logprobs"], ids, wanted, asked)
        assert one["logprobs"] is None
    only = choice(tiny, TEXT, prompt=ids, prompt_logprobs=asked, max_tokens=0)
    assert (only["text"], only["finish_reason"]) == ("", "length")
    same_scores(only["prompt_logprobs"], ids, wanted, asked)
    assert "prompt_logprobs" not in choice(tiny, TEXT, prompt=ids, max_tokens=2)


def test_a_chats_prompt_has_log_probabilities(tiny: Server, scored: Scored) -> None:
    messages = [user("Say something.")]
    found = answer(tiny, CHAT, messages=messages, prompt_logprobs=1, max_tokens=2)
    ids = tiny.post("/tokenize", {"messages": messages}).json()["tokens"]
    same_scores(found["prompt_logprobs"], ids, scored(ids), 1)
    assert "prompt_logprobs" not in answer(tiny, CHAT, messages=messages, max_tokens=2)


def test_a_prompts_log_probabilities_do_not_come_from_the_prefix_cache(tiny: Server) -> None:
    ids = long_prompt(tiny, 600)
    fields: Json = {"prompt": ids, "prompt_logprobs": 0, "max_tokens": 1, "temperature": 0}
    first, second = (answer(tiny, TEXT, **fields) for _ in range(2))
    assert second["choices"] == first["choices"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    cached = answer(tiny, TEXT, prompt=ids, max_tokens=1, temperature=0)
    assert cached["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert cached["choices"][0]["text"] == first["choices"][0]["text"]


def test_log_probabilities_of_prompts_that_are_refused(tiny: Server) -> None:
    for bad in (21, -1, True, "1", 1.5):
        refused(post(tiny, TEXT, prompt_logprobs=bad), "prompt_logprobs")
    for path in (TEXT, CHAT):
        error = refused(post(tiny, path, prompt_logprobs=1, stream=True), "prompt_logprobs")
        assert "echo and logprobs" in error["message"]
    both: Json = {"echo": True, "logprobs": 2, "max_tokens": 1}
    refused(post(tiny, TEXT, prompt_logprobs=1, **both), "prompt_logprobs")
    assert choice(tiny, TEXT, prompt_logprobs=2, **both)["prompt_logprobs"]
    many = {"prompt": long_prompt(tiny, 900), "n": 20, "max_tokens": 1}
    error = refused(post(tiny, TEXT, prompt_logprobs=20, **many), "prompt")
    assert "at most 200000" in error["message"]
