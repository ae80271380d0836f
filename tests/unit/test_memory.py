"""Memory as the bound of an answer's length and of the rows that run together."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mayfly_protocol.requests import TokenPrompt
from mayfly_protocol.serving import Submit
from mayfly_protocol.settings import WorkerSettings
from mayfly_worker.engine.admission import Budget
from mayfly_worker.engine.sequence import SampledToken, StepResult
from mayfly_worker.model.loading import LoadedModel, load
from mayfly_worker.model.memory import within
from mayfly_worker.prepare import Preparer
from mayfly_worker.request_errors import InvalidInput
from mayfly_worker.request_state import RequestState
from support.engine_harness import EngineHarness
from support.worker import generation

ROOM = 120
"""Tokens that there is memory for; the model's own context is 2048."""
BYTES = 256
LEFT = 16


@pytest.fixture(scope="module")
def loaded(tiny_model: Path) -> LoadedModel:
    settings = WorkerSettings("tiny/0", 1, "", "", str(tiny_model), "tiny")
    return load(settings, lambda *_: None)


@pytest.fixture
def budget() -> Budget:
    return Budget(max_rows=32, kv_bytes=ROOM * BYTES, bytes_per_token=BYTES)


def test_the_context_is_what_memory_holds_of_it(loaded: LoadedModel, budget: Budget) -> None:
    card = loaded.card
    assert within(card, budget).context == ROOM
    assert within(replace(card, context=0), budget).context == ROOM
    fits = replace(card, context=100)
    assert within(fits, budget) == fits
    assert within(card, budget).context_from == (
        "what fits into memory, instead of 2,048 by max_position_embeddings in config.json"
    )
    assert within(replace(card, context=0), budget).context_from == "what fits into memory"
    assert within(card, replace(budget, bytes_per_row=20 * BYTES)).context == ROOM - 20
    assert within(card, replace(budget, kv_bytes=0)).context == 1, "0 would mean no limit"
    assert within(card, replace(budget, bytes_per_token=0)) == card


@pytest.mark.parametrize("max_tokens", [None, LEFT, 10**9])
@pytest.mark.parametrize("n", [1, 3])
def test_R27_an_answer_that_memory_ends_has_filled_the_context(
    loaded: LoadedModel, budget: Budget, max_tokens: int | None, n: int
) -> None:
    """Choices that do not fit together run one after the other."""
    fitted = replace(loaded, card=within(loaded.card, budget))
    prompt = TokenPrompt((5,) * (ROOM - LEFT))
    submit = Submit("r", 1, generation(prompt, max_tokens=max_tokens, n=n, ignore_eos=True))
    prepared = Preparer(fitted, budget, itertools.count()).prepare(submit)
    starts = RequestState(b"", submit, "key").accept(prepared)
    harness = EngineHarness(loaded.model, loaded.probe.width, kv_bytes=budget.kv_bytes)
    for start in starts:
        harness.engine.commands.put(start)
    drawn: dict[int, list[SampledToken]] = {choice.sequence.id: [] for choice in prepared.choices}
    while not all(tokens and tokens[-1].end for tokens in drawn.values()):
        harness.engine.turn()
        assert harness.engine.running <= 1
        for event in harness.events:
            for token in event.tokens if isinstance(event, StepResult) else ():
                drawn[token.row].append(token)
        harness.events.clear()
    assert [len(tokens) for tokens in drawn.values()] == [LEFT] * n
    assert {tokens[-1].end for tokens in drawn.values()} == {"length"}


def test_choices_that_fit_together_share_their_prefill(loaded: LoadedModel, budget: Budget) -> None:
    def starts(n: int, budget: Budget = budget, **options: Any) -> list[int]:
        """Returns the number of choices in each of a request's starts."""
        wanted = generation(TokenPrompt((5, 6)), max_tokens=8, n=n)
        submit = Submit("r", 1, wanted, **options)
        prepared = Preparer(loaded, budget, itertools.count()).prepare(submit)
        return [len(start.rows) for start in RequestState(b"", submit, "key").accept(prepared)]

    assert starts(3) == [3]
    fit = ROOM // (2 * (2 + 8))  # twice, for the copy that a join makes
    assert starts(12) == [fit] + [1] * (12 - fit)
    few = replace(budget, max_rows=2)
    assert starts(5, few) == [2, 1, 1, 1]
    assert starts(2, replace(budget, max_rows=1)) == [1, 1]
    assert starts(3, resume=((7,), (), ())) == [1, 1, 1]


def test_an_answer_counts_for_what_it_is_likely_to_need(loaded: LoadedModel) -> None:
    """A request without max_tokens asks for the whole context, and is admitted for a part of it."""
    budget = Budget(max_rows=32, kv_bytes=4 * 2048 * BYTES, bytes_per_token=BYTES)
    submit = Submit("r", 1, generation(TokenPrompt((5, 6)), max_tokens=None, n=3))
    assert Preparer(loaded, budget, itertools.count()).prepare(submit).together >= 3


def test_more_choices_than_rows_come_one_after_the_other(loaded: LoadedModel) -> None:
    rows, n = 3, 8
    sampled = generation(TokenPrompt(tuple(range(20, 60))), temperature=0.8, n=n, ignore_eos=True)

    def run(max_rows: int) -> tuple[list[list[int]], int]:
        budget = Budget(max_rows=max_rows, kv_bytes=1 << 30, bytes_per_token=BYTES)
        submit = Submit("r", 1, sampled)
        prepared = Preparer(loaded, budget, itertools.count()).prepare(submit)
        harness = EngineHarness(loaded.model, loaded.probe.width, max_rows=max_rows)
        for start in RequestState(b"", submit, "key").accept(prepared):
            harness.engine.commands.put(start)
        drawn: dict[int, list[SampledToken]] = {
            choice.sequence.id: [] for choice in prepared.choices
        }
        most = 0
        while not all(tokens and tokens[-1].end for tokens in drawn.values()):
            harness.engine.turn()
            most = max(most, harness.engine.running)
            for event in harness.events:
                for token in event.tokens if isinstance(event, StepResult) else ():
                    drawn[token.row].append(token)
            harness.events.clear()
        return [[token.token for token in tokens] for tokens in drawn.values()], most

    at_once, all_of_them = run(32)
    in_turn, at_most = run(rows)
    assert (all_of_them, at_most) == (n, rows)
    assert in_turn == at_once
    assert len({tuple(ids) for ids in at_once}) > 1


def test_a_prompt_that_memory_has_no_room_for(loaded: LoadedModel, budget: Budget) -> None:
    fitted = replace(loaded, card=within(loaded.card, budget))
    preparer = Preparer(fitted, budget, itertools.count())
    with pytest.raises(InvalidInput, match=rf"{ROOM} tokens.*{ROOM} tokens") as caught:
        preparer.prepare(Submit("r", 1, generation(TokenPrompt((5,) * ROOM))))
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")
