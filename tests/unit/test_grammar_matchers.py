"""Positions of an output in its grammar: beginnings, ends, and rollback."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from mayfly_protocol.requests import Constraint
from mayfly_worker.grammar.compiler import GrammarCompiler
from mayfly_worker.request_errors import GrammarFailed, InvalidInput
from support import vocabularies
from support.grammar import END, GRAMMARS, PLAIN, WIDTH, allowed, sample, schema
from support.schemas import COLOUR, SCHEMAS, integer


def test_ends_are_allowed_exactly_where_the_output_is_complete() -> None:
    matcher = GRAMMARS.compile(Constraint("regex", "ab?c?")).matcher()
    seen = []
    for id in vocabularies.in_pieces("abc", PLAIN):
        seen.append((END in allowed(matcher), matcher.finished))
        matcher.consume(id)
    assert seen == [(False, False), (True, False), (True, False)]
    assert allowed(matcher) == [END]
    assert matcher.finished


def test_every_end_token_of_the_model_counts() -> None:
    tokenizer = type(PLAIN)(PLAIN._tokenizer, eos_token_ids=[0, 2])
    matcher = GrammarCompiler(tokenizer, WIDTH).compile(Constraint("choice", '[""]')).matcher()
    assert allowed(matcher) == [0, 2]


def test_a_replayed_matcher_goes_on_as_the_undisturbed_one() -> None:
    compiled = schema(SCHEMAS["from pydantic"])
    rng = np.random.default_rng(5)
    undisturbed, ids = compiled.matcher(), list[int]()
    while END not in allowed(undisturbed):
        resumed = compiled.matcher()
        resumed.replay(ids)
        assert allowed(resumed) == allowed(undisturbed)
        ids.append(int(rng.choice(allowed(undisturbed))))
        undisturbed.consume(ids[-1])


def test_matchers_of_one_grammar_are_independent() -> None:
    compiled = GRAMMARS.compile(Constraint("choice", '["ab", "cd"]'))
    one, other = compiled.matcher(), compiled.matcher()
    before = allowed(other)
    one.consume(vocabularies.ids_of("c", PLAIN)[0])
    assert allowed(other) == before


def test_a_token_that_is_not_allowed_fails_its_row() -> None:
    (wrong,) = vocabularies.ids_of("x", PLAIN)
    for step in (lambda m: m.consume(wrong), lambda m: m.replay([wrong])):
        matcher = GRAMMARS.compile(Constraint("choice", '["a"]')).matcher()
        with pytest.raises(GrammarFailed, match="satisfy"):
            step(matcher)
        with pytest.raises(GrammarFailed):
            allowed(matcher)


def test_ids_beyond_the_tokenizer_are_never_allowed_and_narrow_logits_are_fine() -> None:
    matcher = GRAMMARS.compile(Constraint("regex", "(?s:.*)")).matcher()
    assert max(allowed(matcher)) < len(PLAIN) < WIDTH
    narrow = len(PLAIN) - 100
    matcher = GrammarCompiler(PLAIN, narrow).compile(Constraint("regex", "(?s:.*)")).matcher()
    ids = allowed(matcher, narrow)
    assert END in ids
    assert max(ids) < (narrow + 31) // 32 * 32


def test_grammars_are_kept() -> None:
    assert schema(COLOUR) is schema(COLOUR)
    assert schema(COLOUR) is not schema(SCHEMAS["flat"])


def test_threads_may_compile_at_once() -> None:
    grammars = GrammarCompiler(PLAIN, WIDTH)
    with ThreadPoolExecutor(4) as pool:
        texts = list(
            pool.map(
                lambda n: sample(
                    grammars.compile(Constraint("json_schema", json.dumps(integer(n, n)))), n
                ),
                range(12),
            )
        )
    assert texts == [str(n) for n in range(12)]


@pytest.mark.parametrize(
    ("tokenizer", "why"),
    [
        (vocabularies.python_written(), "written in Python"),
        (
            type(PLAIN)(PLAIN._tokenizer.__class__(tokenizer_object=PLAIN._tokenizer._tokenizer)),
            "end",
        ),
    ],
)
def test_a_tokenizer_that_grammars_cannot_use_is_an_answer(tokenizer: Any, why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        GrammarCompiler(tokenizer, WIDTH).compile(Constraint("choice", '["a"]'))
