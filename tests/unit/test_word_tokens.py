"""Tokens of bad words and of sequence breakers, and prompts that a request cuts."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mayfly_protocol.requests import (
    Constraint,
    Dry,
    Ending,
    Generation,
    Output,
    Sampling,
    TextPrompt,
    TokenPrompt,
)
from mayfly_protocol.serving import Submit
from mayfly_worker.engine.admission import Budget
from mayfly_worker.prepare import PreparedRequest, Preparer
from mayfly_worker.request_errors import InvalidInput, PromptTooLong
from mayfly_worker.text.word_tokens import bad_sequences, sequence_breakers
from support import vocabularies

TOKENIZER = vocabularies.byte_level("thinking")
WIDTH = len(TOKENIZER)
END = 2
PROMPT = TokenPrompt((5, 6, 7))


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


def text_of(ids: list[int]) -> str:
    return str(TOKENIZER.decode(ids, skip_special_tokens=False))


def prepared(generation: Generation, context: int = 1000) -> PreparedRequest:
    loaded = SimpleNamespace(
        tokenizer=TOKENIZER,
        probe=SimpleNamespace(width=WIDTH),
        card=SimpleNamespace(context=context, sampling={}),
    )
    preparer = Preparer(loaded, Budget(8, 1 << 30, 1), itertools.count())  # type: ignore[arg-type]
    return preparer.prepare(Submit("r", 1, generation))


def asked(prompt: Any = PROMPT, **more: Any) -> Generation:
    sampling = more.pop("sampling", Sampling(seed=0))
    return Generation("m", prompt, sampling, **more)


def test_bad_words_are_written_at_the_beginning_and_after_a_space() -> None:
    assert set(bad_sequences(["the"], TOKENIZER, WIDTH)) <= {ids_of("the"), ids_of(" the")}
    assert ids_of("the") in bad_sequences(["  the"], TOKENIZER, WIDTH)
    with pytest.raises(InvalidInput, match="cannot generate"):
        bad_sequences(["the"], TOKENIZER, 3)
    with pytest.raises(InvalidInput, match="at most"):
        bad_sequences([f"word {n}" for n in range(1025)], TOKENIZER, WIDTH)


@settings(deadline=None, max_examples=60)
@given(
    st.text("ab: \nU", max_size=12),
    st.sampled_from([("\n",), ("U:",), ("ab:", "\n"), (": ", "aa")]),
)
def test_a_breaker_ends_where_its_text_ends(text: str, texts: tuple[str, ...]) -> None:
    """In the tokens in which the tokenizer writes a text: nowhere else, and at each token that has
    a breaker in it."""
    breakers = sequence_breakers(texts, TOKENIZER, WIDTH)
    ids = list(ids_of(text))
    end = breakers.last_end(np.array(ids, dtype=np.int64))
    if end:
        last = text_of(ids[:end])
        ends = [last.rfind(each) + len(each) for each in texts if each in last]
        assert len(text_of(ids[: end - 1])) < max(ends)
    whole = [n for n, id in enumerate(ids, start=1) if any(each in text_of([id]) for each in texts)]
    assert end >= max(whole, default=0)


def test_a_breaker_across_tokens_is_found() -> None:
    breakers = sequence_breakers(("<think>x",), TOKENIZER, WIDTH)
    ids = ids_of("<think>xy")
    assert breakers.last_end(np.array(ids)) == len(ids) - 1
    assert breakers.last_end(np.array(ids_of("<think>y"))) == 0


def test_requests_carry_the_tokens_of_their_words() -> None:
    sampling = Sampling(
        seed=0, bad_words=("the",), dry=Dry(0.8, breakers=("\n",)), xtc_probability=0.5
    )
    [choice] = prepared(asked(sampling=sampling)).choices
    row = choice.sequence.sampling
    assert ids_of("the") in row.bad_words
    assert row.breakers is sequence_breakers(("\n",), TOKENIZER, WIDTH)
    assert {END, *ids_of("\n")} <= set(row.kept_by_xtc)
    [plain] = prepared(asked()).choices
    assert not plain.sequence.sampling.has_history


def test_bans_that_leave_nothing_are_refused() -> None:
    only = Sampling(seed=0, allowed_ids=(END, 9))
    assert prepared(asked(sampling=only, ending=Ending(min_tokens=2)))
    last = Sampling(seed=0, allowed_ids=(END,))
    with pytest.raises(InvalidInput) as caught:
        prepared(asked(sampling=last, ending=Ending(min_tokens=2)))
    assert caught.value.param == "allowed_token_ids"
    word = Sampling(seed=0, allowed_ids=ids_of("a"), bad_words=("a",))
    with pytest.raises(InvalidInput, match="forbid every token"):
        prepared(asked(sampling=word))
    with pytest.raises(InvalidInput) as beyond:
        prepared(asked(sampling=Sampling(seed=0, allowed_ids=(WIDTH,))))
    assert beyond.value.param == "allowed_token_ids"


@pytest.mark.parametrize(
    ("limit", "most", "kept"),
    [(None, 5, 10), (4, 5, 4), (10, 5, 10), (99, 5, 10), (-1, 5, 10), (-1, 95, 5), (-1, None, 10)],
)
def test_the_last_tokens_of_a_prompt_are_kept(
    limit: int | None, most: int | None, kept: int
) -> None:
    ids = tuple(range(20, 30))
    ending = Ending(max_tokens=most)
    found = prepared(
        asked(TokenPrompt(ids), ending=ending, prompt_limit=limit, output=Output(prompt_ids=True)),
        context=100,
    )
    assert found.prompt_ids == ids[-kept:]
    assert found.prompt_tokens == kept
    assert found.choices[0].sequence.tokens == list(ids[-kept:])


def test_a_prompt_longer_than_the_context_is_cut_or_refused() -> None:
    long = TokenPrompt(tuple([9] * 150))
    assert prepared(asked(long, prompt_limit=-1), context=100).prompt_tokens == 99
    for limit in (None, 120):
        with pytest.raises(PromptTooLong):
            prepared(asked(long, prompt_limit=limit), context=100)


def test_special_tokens_are_part_of_the_text_if_asked_for() -> None:
    special = next(
        id for id, token in TOKENIZER._tokenizer.added_tokens_decoder.items() if token.special
    )
    for shown in (False, True):
        [choice] = prepared(asked(output=Output(special_tokens=shown))).choices
        pieces = [choice.text.feed(id).text for id in (*ids_of("a"), special, *ids_of("b"))]
        text = "".join(pieces) + choice.text.end("length").text
        assert text == (f"a{text_of([special])}b" if shown else "ab")


def test_a_text_without_special_tokens_before_it() -> None:
    ids = prepared(asked(TextPrompt("hi", special=False))).choices[0].sequence.tokens
    assert tuple(ids) == ids_of("hi")


def test_a_format_forbids_no_end_token() -> None:
    output = Output(constraint=Constraint("choice", '["a"]'))
    [choice] = prepared(asked(output=output)).choices
    assert choice.sequence.sampling.banned == ()
