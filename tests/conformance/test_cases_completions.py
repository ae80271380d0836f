"""Prompts without a conversation, in all their forms. docs/reported-faults.md lists the ids in test
names."""

from __future__ import annotations

from typing import Any

import pytest

from support.api_client import TEXT, Json, answer, choice, post, refused, tokenizer_of, whole_stream
from support.server import Server

P, Q = "Once upon a time", "def main():"


def texts(server: Server, **fields: Any) -> list[str]:
    found = answer(server, TEXT, **fields)["choices"]
    assert [one["index"] for one in found] == list(range(len(found)))
    return [one["text"] for one in found]


def test_R44_three_choices(tiny: Server) -> None:
    asked: Json = {"prompt": "ab", "temperature": 1.5, "seed": 1, "max_tokens": 12}
    found = texts(tiny, **asked, n=3)
    assert len(set(found)) == 3
    assert found[:1] == texts(tiny, **asked)


def test_R44_best_of_is_refused_where_it_would_mean_something(tiny: Server) -> None:
    for fields in ({"best_of": 2}, {"best_of": 3, "n": 2}, {"best_of": 1, "n": 2}):
        refused(post(tiny, TEXT, **fields), "best_of")
    for fields in ({"best_of": 1}, {"best_of": 2, "n": 2}, {"best_of": None}):
        assert len(texts(tiny, **fields)) == fields.get("n", 1)


def test_R44_an_echo_comes_first(tiny: Server) -> None:
    [plain], [echoed] = texts(tiny, prompt=P), texts(tiny, prompt=P, echo=True)
    assert echoed == P + plain


@pytest.mark.parametrize("bad", [6, -1, True, "3", 1.5, [1]])
def test_R44_logprobs_are_a_small_number(tiny: Server, bad: Any) -> None:
    refused(post(tiny, TEXT, logprobs=bad), "logprobs")


@pytest.mark.parametrize("asked", [0, 3, 5])
def test_R44_logprobs_come_as_many_as_asked_for(tiny: Server, asked: int) -> None:
    found = choice(tiny, TEXT, logprobs=asked, max_tokens=4)["logprobs"]
    assert len(found["tokens"]) == len(found["token_logprobs"]) == 4
    assert [len(top) for top in found["top_logprobs"]] == [max(asked, 1)] * 4
    assert choice(tiny, TEXT, max_tokens=4)["logprobs"] is None


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("prompt", ["", [""], ["ab", ""], [], [[]], [[1], []], None, 5, {}, [None]])
def test_R49_prompts_of_nothing(tiny: Server, prompt: Any, streamed: bool) -> None:
    """The tokenizer adds no token of its own, so that an empty text is no prompt either."""
    refused(post(tiny, TEXT, prompt=prompt, stream=streamed), "prompt")
    assert choice(tiny, TEXT)["text"]


def test_R49_a_prompt_is_needed(tiny: Server) -> None:
    error = refused(tiny.post(TEXT, {"model": tiny.model}), "prompt")
    assert error["code"] == "missing_required_parameter"


@pytest.mark.parametrize("prompt", ["", [""]])
def test_R49_where_prompts_begin_with_a_token_nothing_is_a_prompt(
    fussy: Server, prompt: Any
) -> None:
    found = answer(fussy, TEXT, prompt=prompt, max_tokens=2)
    assert found["usage"]["prompt_tokens"] == 1
    assert found["usage"]["completion_tokens"] == 2
    refused(post(fussy, TEXT, prompt=[]), "prompt")
    refused(post(fussy, TEXT, prompt=[[]]), "prompt")


def test_R51_the_forms_of_a_prompt(tiny: Server) -> None:
    tokenizer = tokenizer_of(tiny)
    ids_p, ids_q = tokenizer.encode(P).ids, tokenizer.encode(Q).ids
    [text_p], [text_q] = texts(tiny, prompt=P), texts(tiny, prompt=Q)
    assert text_p != text_q
    for form in ([P], ids_p, [ids_p]):
        assert texts(tiny, prompt=form) == [text_p]
    for forms in ([P, Q], [ids_p, ids_q]):
        found = answer(tiny, TEXT, prompt=forms)
        assert [one["text"] for one in found["choices"]] == [text_p, text_q]
        assert found["usage"]["prompt_tokens"] == len(ids_p) + len(ids_q)
        assert found["usage"]["completion_tokens"] == 16
        streamed = whole_stream(tiny, TEXT, prompt=forms, stream_options={"include_usage": True})
        assert [streamed.text(0), streamed.text(1)] == [text_p, text_q]
        assert [streamed.finish(0), streamed.finish(1)] == ["length", "length"]
        assert streamed.usage is not None
        assert streamed.usage["total_tokens"] == found["usage"]["total_tokens"]


def test_R51_many_prompts_with_many_choices(tiny: Server) -> None:
    asked: Json = {"temperature": 1.5, "seed": 4, "n": 2}
    prompts = [f"{number} and" for number in range(20)]
    alone = [text for prompt in prompts for text in texts(tiny, prompt=prompt, **asked)]
    assert texts(tiny, prompt=prompts, **asked) == alone
    refused(post(tiny, TEXT, prompt=["a"] * 129), "prompt")
    refused(post(tiny, TEXT, prompt=["a"] * 65, n=2), "n")


@pytest.mark.parametrize(
    "mixed",
    [[P, [1, 2]], [P, 5], [5, P], [[1], 5], [[1], [1.5]], [1, True], [1, -1], [["a"]], [[[1]]]],
)
def test_R51_mixtures(tiny: Server, mixed: Any) -> None:
    refused(post(tiny, TEXT, prompt=mixed), "prompt")


@pytest.mark.parametrize("id", [10**6, 2**31, 2**40])
@pytest.mark.parametrize("several", [False, True])
def test_R51_ids_that_do_not_exist(tiny: Server, id: int, several: bool) -> None:
    width = tokenizer_of(tiny).get_vocab_size()
    for wrong in (id, width):
        refused(post(tiny, TEXT, prompt=[[1], [1, wrong]] if several else [1, wrong]), "prompt")
    assert choice(tiny, TEXT, prompt=[1, width - 1])["text"]


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_R55_the_prompt_and_nothing_else(tiny: Server, as_ids: bool, n: int) -> None:
    ids = tokenizer_of(tiny).encode(P).ids
    asked: Json = {"prompt": ids if as_ids else P, "echo": True, "max_tokens": 0, "n": n}
    whole = answer(tiny, TEXT, **asked)
    for one in whole["choices"]:
        assert (one["text"], one["finish_reason"]) == (P, "length")
    assert whole["usage"]["completion_tokens"] == 0
    assert whole["usage"]["prompt_tokens"] == len(ids)
    streamed = whole_stream(tiny, TEXT, **asked, stream_options={"include_usage": True})
    for index in range(n):
        assert (streamed.text(index), streamed.finish(index)) == (P, "length")
    assert streamed.usage is not None
    assert streamed.usage["completion_tokens"] == 0


@pytest.mark.parametrize("n", [1, 3])
def test_R55_an_echo_in_a_stream(tiny: Server, n: int) -> None:
    asked: Json = {"prompt": [P, Q], "n": n, "temperature": 1, "seed": 2}
    plain = texts(tiny, **asked)
    echoed = texts(tiny, **asked, echo=True)
    assert echoed == [(P if i < n else Q) + text for i, text in enumerate(plain)]
    streamed = whole_stream(tiny, TEXT, **asked, echo=True)
    assert [streamed.text(index) for index in range(2 * n)] == echoed


@pytest.mark.parametrize("echo", [None, False])
def test_R55_nothing_at_all_is_refused(tiny: Server, echo: bool | None) -> None:
    refused(post(tiny, TEXT, max_tokens=0, echo=echo), "max_tokens")


@pytest.mark.parametrize("streamed", [False, True])
def test_R56_suffixes(tiny: Server, streamed: bool) -> None:
    response = post(tiny, TEXT, prompt="def f(", suffix="):\n  pass", stream=streamed)
    assert refused(response, "suffix")["code"] == "unsupported_parameter"
    plain = choice(tiny, TEXT, prompt="def f(")
    for none in (None, ""):
        assert choice(tiny, TEXT, prompt="def f(", suffix=none) == plain
