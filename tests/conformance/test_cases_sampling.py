"""Sampling parameters that are invalid, and those that must have an effect. docs/reported-faults.md
lists the ids in test names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from support.api_client import (
    CHAT,
    PATHS,
    Json,
    Stream,
    answer,
    body,
    choice,
    fields_of,
    post,
    refused,
    tokenizer_of,
    user,
    whole_stream,
)
from support.scripted_answers import NEVER_ENDING
from support.server import Server

both_routes = pytest.mark.parametrize("path", PATHS)

# What both routes have to refuse, by the field that the error has to name.
BAD_VALUES: list[tuple[str, Any, str]] = [
    ("stream_options", {"include_usage": "yes"}, "stream_options.include_usage"),
    ("stream", "true", "stream"),
    ("stream", 1, "stream"),
    ("seed", 1.5, "seed"),
    ("top_k", -2, "top_k"),
    ("top_k", "5", "top_k"),
    ("top_p", 2.0, "top_p"),
    ("top_p", -0.1, "top_p"),
    ("top_p", True, "top_p"),
    ("temperature", "x", "temperature"),
    ("temperature", -1, "temperature"),
    ("temperature", 2.1, "temperature"),
    ("logit_bias", {"1": None}, "logit_bias.1"),
    ("logit_bias", {"1": True}, "logit_bias.1"),
    ("logit_bias", {"1": "5"}, "logit_bias.1"),
    ("logit_bias", {"1": 101}, "logit_bias.1"),
    ("logit_bias", {"abc": 1}, "logit_bias"),
    ("logit_bias", {"-1": 5}, "logit_bias"),
    ("logit_bias", {"5000": 5}, "logit_bias"),
    ("logit_bias", {"9999999999": 5}, "logit_bias"),
    ("logit_bias", {"9" * 5000: 5}, "logit_bias"),
    ("logit_bias", {str(id): 1 for id in range(1025)}, "logit_bias"),
    ("logit_bias", [1, 2], "logit_bias"),
    ("stop_token_ids", [5000], "stop_token_ids"),
    ("allowed_token_ids", [1, 5000], "allowed_token_ids"),
    ("mirostat", 2, "mirostat"),
    ("dry_sequence_breakers", [], "dry_sequence_breakers"),
    ("typical_p", 1.1, "typical_p"),
    ("repetition_penalty", -1, "repetition_penalty"),
    ("repetition_penalty", 0, "repetition_penalty"),
    ("repetition_penalty", 1e-300, "repetition_penalty"),
    ("min_p", 2, "min_p"),
    ("min_p", -0.1, "min_p"),
    ("presence_penalty", 99, "presence_penalty"),
    ("frequency_penalty", "a", "frequency_penalty"),
    ("n", 0, "n"),
    ("n", 129, "n"),
    ("n", 1.5, "n"),
    ("stop", [5], "stop[0]"),
    ("stop", "", "stop"),
    ("stop", ["x" * 5000], "stop[0]"),
    ("max_tokens", -1, "max_tokens"),
    ("max_tokens", "8", "max_tokens"),
    ("model", 5, "model"),
    ("user", 5, "user"),
    ("guided_regex", "(", "guided_regex"),
    ("guided_choice", [], "guided_choice"),
]


def brief(value: Any) -> str:
    return str(value)[:40]


RAW = ['"temperature": NaN', '"top_p": -Infinity', '"logit_bias": {"1": 1e999}', '"seed": 1e999']


@contextmanager
def beside_a_stream(server: Server) -> Iterator[Future[Stream]]:
    """A long stream runs meanwhile, and has to be what it is without company."""
    asked: Json = {
        **{"messages": [user("[on and on]")], "max_tokens": 60},
        "stream_options": {"include_usage": True},
    }
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(whole_stream, server, CHAT, **asked)
        yield running
        streamed = running.result()
    assert NEVER_ENDING.startswith(streamed.text())
    assert streamed.finish() == "length"
    assert streamed.usage is not None
    assert streamed.usage["completion_tokens"] == 60


@both_routes
@pytest.mark.parametrize(("field", "value", "param"), BAD_VALUES, ids=brief)
def test_R38_R39_R40_R43_R66_R67_bad_values(
    tiny: Server, path: str, field: str, value: Any, param: str
) -> None:
    error = refused(post(tiny, path, **{field: value}), param)
    assert len(error["message"]) < 1000


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/responses", {"input": "hi", "max_output_tokens": 8}),
        ("/v1/messages", {"messages": [user("hi")], "max_tokens": 8}),
        ("/tokenize", {"prompt": "hi"}),
    ],
)
def test_R67_other_routes_refuse_what_these_do(tiny: Server, path: str, asked: Json) -> None:
    fields = fields_of(tiny, path)
    asked = {"model": tiny.model, **asked}
    assert tiny.post(path, asked).status_code == 200
    # Fields that a route refuses whatever their value are described as null; empty, they are taken.
    taken = {name for name, field in fields.items() if field.get("type") != "null"}
    shared = [(field, value) for field, value, _ in BAD_VALUES if field in taken]
    assert shared
    for field, value in shared:
        response = tiny.post(path, {**asked, field: value})
        assert response.status_code == 400, (field, value, response.text)


@both_routes
@pytest.mark.parametrize("raw", RAW)
def test_R40_numbers_that_are_none(tiny: Server, path: str, raw: str) -> None:
    asked = json.dumps(body(tiny, path))[:-1] + f", {raw}}}"
    response = tiny.http.post(path, content=asked, headers={"content-type": "application/json"})
    assert refused(response)["code"] == "invalid_json"


@both_routes
def test_R41_R43_bad_values_beside_a_stream(slow: Server, path: str) -> None:
    beyond = str(tokenizer_of(slow).get_vocab_size() + 10)
    with beside_a_stream(slow) as running:
        for bias in ({beyond: 5}, {"-1": 5}):
            refused(post(slow, path, logit_bias=bias), "logit_bias")
        for field, value, param in BAD_VALUES[: len(BAD_VALUES) // 2]:
            refused(post(slow, path, **{field: value}), param)
        assert not running.done(), "it was to run all the time"
        for field, value, param in BAD_VALUES[len(BAD_VALUES) // 2 :]:
            refused(post(slow, path, **{field: value}), param)


@both_routes
def test_R41_the_last_id_is_one_and_the_next_is_not(tiny: Server, path: str) -> None:
    last = tokenizer_of(tiny).get_vocab_size() - 1
    assert choice(tiny, path, logit_bias={str(last): 5})["text"]
    refused(post(tiny, path, logit_bias={str(last + 1): 5}), "logit_bias")


@both_routes
def test_R38_R39_values_that_turn_something_off(tiny: Server, path: str) -> None:
    """Each value gives the answer that is given without it, at a temperature at which a difference
    would show."""
    asked: Json = {"temperature": 1.5, "seed": 7, "max_tokens": 24}
    plain = choice(tiny, path, **asked)["text"]
    for off in (
        {"top_k": 0},
        {"top_k": -1},
        {"top_k": 2**63 - 1},
        {"top_k": 10**6},
        {"top_p": 1},
        {"min_p": 0},
        {"repetition_penalty": 1},
        {"presence_penalty": 0, "frequency_penalty": 0.0},
        {"logit_bias": {}},
        {"typical_p": 1, "top_n_sigma": 0, "xtc_probability": 0, "xtc_threshold": 0.2},
        {"top_n_sigma": -1, "dry_multiplier": 0, "dry_base": 1.75, "dry_penalty_last_n": -1},
        {"dry_multiplier": 1, "dry_penalty_last_n": 0},
        {"mirostat": 0, "mirostat_tau": 5, "mirostat_eta": 0.1, "dynatemp_range": 0.0},
        {"repeat_penalty": 1, "repeat_last_n": 64, "repetition_context_size": 20},
        {"repetition_penalty": 1.5, "repeat_last_n": 0},
        {"bad_words": [], "allowed_token_ids": [], "structured_outputs": {}},
        {"truncate_prompt_tokens": -1, "skip_special_tokens": True, "return_token_ids": False},
    ):
        assert choice(tiny, path, **asked, **off)["text"] == plain, off


@both_routes
def test_R39_no_nucleus_at_all_is_greedy(tiny: Server, path: str) -> None:
    greedy = choice(tiny, path, max_tokens=24)["text"]
    for least in ({"top_p": 0}, {"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1}):
        for seed in (1, 2):
            found = choice(tiny, path, **least, temperature=1.5, seed=seed, max_tokens=24)
            assert found["text"] == greedy
    coldest = choice(tiny, path, temperature=1e-300, max_tokens=24)
    assert coldest["text"] == greedy


@both_routes
def test_R38_without_a_seed_two_answers_differ(tiny: Server, path: str) -> None:
    texts = [choice(tiny, path, temperature=1, max_tokens=24)["text"] for _ in range(3)]
    assert len(set(texts)) == 3


def tokens(server: Server, **fields: Any) -> list[str]:
    """The tokens of all choices of a chat."""
    found = answer(server, CHAT, **fields, logprobs=True)
    return [token["token"] for one in found["choices"] for token in one["logprobs"]["content"]]


def test_R39_biases_are_heeded(tiny: Server) -> None:
    asked: Json = {"temperature": 2, "seed": 1, "n": 16, "max_tokens": 24}
    tokenizer = tokenizer_of(tiny)
    drawn = [token for token in tokens(tiny, **asked) if token.isascii()]
    banned = max(set(drawn), key=drawn.count)
    id = str(tokenizer.encode(banned).ids[0])
    assert tokenizer.decode([int(id)]) == banned
    assert banned not in tokens(tiny, **asked, logit_bias={id: -100})
    assert set(tokens(tiny, **asked, logit_bias={id: 100})) == {banned}
    streamed = whole_stream(tiny, CHAT, **asked, logit_bias={id: 100})
    assert streamed.text(15) == banned * 24


@both_routes
@pytest.mark.parametrize("name", ["", " ", "nonsense", "/etc/passwd", "../tiny", "x" * 5000])
def test_R39_models_that_are_not_served(tiny: Server, path: str, name: str) -> None:
    assert refused(post(tiny, path, model=name), "model", 404)["code"] == "model_not_found"


@both_routes
def test_R60_seeds_decide(tiny: Server, path: str) -> None:
    """Alone and again, when the prompt comes from the cache."""
    prompt = "a prompt of some length, " * 10
    fields: Json = {"messages": [user(prompt)]} if path == CHAT else {"prompt": prompt}
    asked = fields | {"temperature": 1.5, "max_tokens": 24}
    cold = answer(tiny, path, **asked, seed=11)
    warm = answer(tiny, path, **asked, seed=11)
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    others = [choice(tiny, path, **asked, seed=seed)["text"] for seed in (12, 13)]
    assert cold["choices"] == warm["choices"]
    first = cold["choices"][0]
    text = first["message"]["content"] if path == CHAT else first["text"]
    assert len({text, *others}) == 3
    assert choice(tiny, path, **asked, seed=11)["text"] == text


@pytest.mark.parametrize(("field", "value", "param"), BAD_VALUES, ids=brief)
def test_R66_openais_own_client_reads_the_errors(
    tiny: Server, field: str, value: Any, param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        tiny.client.chat.completions.create(
            model=tiny.model,
            messages=[{"role": "user", "content": "hi"}],
            extra_body={field: value},
        )
    error = caught.value
    assert (error.type, error.param) == ("invalid_request_error", param)
    assert error.body["message"]  # type: ignore[index]


@both_routes
def test_R66_names_that_a_client_made_up_are_not_repeated(tiny: Server, path: str) -> None:
    for name in ("<script>alert(1)</script>", "a\nb", "\u202egnp", "x" * 200):
        response = post(tiny, path, **{name: 1})
        assert response.headers["mayfly-ignored"] == "?"
        asked = {"stream": True, "stream_options": {name: 1}}
        response = post(tiny, path, **asked)
        assert refused(response, "stream_options.?")["code"] == "unknown_parameter"
        assert name not in response.text and "<" not in response.text


@both_routes
def test_128_choices_are_as_many_as_there_can_be(tiny: Server, path: str) -> None:
    asked: Json = {"temperature": 2, "seed": 1, "n": 128, "max_tokens": 4, "ignore_eos": True}
    found = answer(tiny, path, **asked)
    assert [one["index"] for one in found["choices"]] == list(range(128))
    assert found["usage"]["completion_tokens"] == 4 * 128
    texts = [one["message"]["content"] if path == CHAT else one["text"] for one in found["choices"]]
    assert len(set(texts)) > 120
    few = answer(tiny, path, **{**asked, "n": 3})["choices"]
    assert [c.get("text") or c["message"]["content"] for c in few] == texts[:3]
