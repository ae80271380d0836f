"""Fields of llama.cpp, mlx-lm and vLLM: the effect of each on an answer over HTTP."""

from __future__ import annotations

from typing import Any

import pytest

from support.api_client import (
    CHAT,
    PATHS,
    TEXT,
    Json,
    answer,
    choice,
    post,
    refused,
    tokenizer_of,
    tokens,
    user,
    whole_stream,
)
from support.server import Server

both_routes = pytest.mark.parametrize("path", PATHS)
HOT: Json = {"temperature": 1.5, "seed": 7, "max_tokens": 40}


@both_routes
@pytest.mark.parametrize(
    "asked",
    [
        {"typical_p": 0.1},
        {"top_n_sigma": 0.5},
        {"xtc_probability": 1, "xtc_threshold": 0.02},
        {"dry_multiplier": 5, "dry_allowed_length": 1, "dry_sequence_breakers": ["zq"]},
        {"repetition_penalty": 3, "repetition_context_size": 8},
        {"repeat_penalty": 3},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_samplers_change_the_answer_and_seeds_repeat_it(
    tiny: Server, path: str, asked: Json
) -> None:
    few: Json = HOT | {"allowed_token_ids": list(range(300, 312))}  # so that tokens are repeated
    plain = choice(tiny, path, **few)["text"]
    once, again = (choice(tiny, path, **few, **asked)["text"] for _ in range(2))
    assert once == again != plain


def test_a_penalty_with_a_window_counts_the_prompt_too(tiny: Server) -> None:
    """The token of the prompt that is the likelier of two is no longer."""
    changed = 0
    for seen in range(300, 312):
        asked: Json = {
            **{"prompt": [seen, 320, 321], "max_tokens": 1, "return_token_ids": True},
            "allowed_token_ids": [seen, seen + 50],
        }
        plain = choice(tiny, TEXT, **asked)["token_ids"]
        strong = asked | {"repetition_penalty": 10}
        assert choice(tiny, TEXT, **strong)["token_ids"] == plain, "else the output alone counts"
        assert choice(tiny, TEXT, **strong, repetition_context_size=2)["token_ids"] == plain
        found = choice(tiny, TEXT, **strong, repetition_context_size=3)["token_ids"]
        changed += found != plain
        assert found in (plain, [seen + 50])
    assert changed


@both_routes
def test_only_allowed_tokens_and_no_bad_words(tiny: Server, path: str) -> None:
    tokenizer = tokenizer_of(tiny)
    allowed = [tokenizer.encode(letter).ids[-1] for letter in "abcd"]
    asked: Json = HOT | {"allowed_token_ids": allowed, "return_token_ids": True}
    found = choice(tiny, path, **asked)
    assert set(found["token_ids"]) == set(allowed)
    word = found["text"][5:8]
    without = choice(tiny, path, **asked, bad_words=[word, found["text"][0]])
    assert word not in without["text"] and found["text"][0] not in without["text"]
    assert len(without["token_ids"]) == 40
    for field, value in (("bad_words", ["a", "b", "c", "d"]), ("allowed_token_ids", [])):
        fields = asked | {field: value}
        if value:
            refused(post(tiny, path, **fields), "allowed_token_ids")
        else:
            assert post(tiny, path, **fields).status_code == 200


@both_routes
def test_token_ids_are_those_of_prompt_and_text(tiny: Server, path: str) -> None:
    asked: Json = HOT | {"n": 2, "return_token_ids": True}
    whole = answer(tiny, path, **asked)
    prompt = {"prompt": "hi"} if path == TEXT else {"messages": [user("hi")]}
    expected = tokens(tiny, **prompt)
    streamed = whole_stream(tiny, path, **asked)
    for index, one in enumerate(whole["choices"]):
        text = one["text"] if path == TEXT else one["message"]["content"]
        assert tokenizer_of(tiny).decode(one["token_ids"]) == text
        ids = [id for part in streamed.of(index) for id in part.get("token_ids", [])]
        assert (ids, streamed.text(index)) == (one["token_ids"], text)
    where = whole["choices"][1] if path == TEXT else whole
    assert where["prompt_token_ids"] == expected
    parts = streamed.of(1) if path == TEXT else streamed.chunks
    assert parts[0]["prompt_token_ids"] == expected
    assert all("prompt_token_ids" not in part for part in parts[1:])


@both_routes
def test_the_end_of_a_long_prompt_is_kept(tiny: Server, path: str) -> None:
    long = "word " * 50
    prompt: Json = {"prompt": long} if path == TEXT else {"messages": [user(long)]}
    asked = {**prompt, "return_token_ids": True}
    everything = tokens(tiny, **prompt)
    cut = answer(tiny, path, **asked, truncate_prompt_tokens=9)
    where = cut["choices"][0] if path == TEXT else cut
    assert where["prompt_token_ids"] == everything[-9:]
    assert cut["usage"]["prompt_tokens"] == 9
    same = choice(tiny, TEXT, prompt=everything[-9:])
    assert choice(tiny, path, **prompt, truncate_prompt_tokens=9)["text"] == same["text"]


@both_routes
def test_a_prompt_beyond_the_context_is_cut_to_it(tiny: Server, path: str) -> None:
    context = tiny.http.get("/v1/models").json()["data"][0]["max_model_len"]
    long = "word " * context
    prompt: Json = {"prompt": long} if path == TEXT else {"messages": [user(long)]}
    response = post(tiny, path, **prompt)
    assert response.json()["error"]["code"] == "context_length_exceeded"
    cut = answer(tiny, path, **prompt, truncate_prompt_tokens=-1)
    assert cut["usage"]["prompt_tokens"] == context - 8
    assert cut["usage"]["completion_tokens"] == 8


@both_routes
def test_special_tokens_are_shown_on_request(tiny: Server, path: str) -> None:
    tokenizer = tokenizer_of(tiny)
    special = max(id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special)
    name = tokenizer.id_to_token(special)
    asked: Json = {"logit_bias": {str(special): 100}, "ignore_eos": True, "max_tokens": 3}
    assert name not in choice(tiny, path, **asked)["text"]
    assert choice(tiny, path, **asked, skip_special_tokens=False)["text"] == name * 3


@both_routes
@pytest.mark.parametrize(
    ("asked", "texts"),
    [
        ({"structured_outputs": {"choice": ["left", "right"]}}, ["left", "right"]),
        ({"structured_outputs": {"regex": "ab{2}"}}, ["abb"]),
        ({"structured_outputs": {"json": {"const": 7}}}, ["7"]),
        ({"json_schema": {"const": 7}}, ["7"]),
        ({"regex": "x"}, ["x"]),
    ],
    ids=str,
)
def test_newer_names_of_formats(tiny: Server, path: str, asked: Json, texts: list[str]) -> None:
    assert choice(tiny, path, **asked)["text"] in texts


@both_routes
def test_the_last_of_many_stop_strings_counts(tiny: Server, path: str) -> None:
    text: Any = choice(tiny, path, **HOT)["text"]
    stops = [f"never {n}" for n in range(63)] + [text[10:13]]
    assert choice(tiny, path, **HOT, stop=stops)["text"] == text[: text.index(text[10:13])]


def test_negative_seeds_repeat_and_minus_one_does_not(tiny: Server) -> None:
    asked: Json = {"temperature": 1.5, "max_tokens": 24}
    texts = [choice(tiny, CHAT, **asked, seed=-7)["text"] for _ in range(2)]
    assert texts[0] == texts[1] == choice(tiny, CHAT, **asked, seed=2**64 - 7)["text"]
    drawn = {choice(tiny, CHAT, **asked, seed=-1)["text"] for _ in range(3)}
    assert len(drawn) == 3
