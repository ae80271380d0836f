"""Random mixes of requests, and what happens around them: every answer is its solo, cold one.

A mix is a row of requests of every kind in one engine. They come one after another or at once, some
are cancelled and some have their text completed, under few or many rows, small or large chunks, and
a prefix cache that may be too small for two prompts. The oracle is the same request alone on a
fresh engine. Equality is exact, as it is with the BLAS that mlx-cpu bundles.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.utils import load_model, load_tokenizer

from mayfly_protocol.requests import Constraint, Sampling
from mayfly_worker.engine.sequence import CancelCommand, SampledToken, Stop
from mayfly_worker.grammar.compiler import CompiledGrammar, GrammarCompiler
from support.engine_harness import EngineAnswer, EngineHarness, EngineRequest, FixedChunks
from support.schemas import SCHEMAS

pytestmark = pytest.mark.heavy

END = 2
"""The tokenizer's end token."""
TOKEN_BYTES = 512
"""Bytes of one token in the prefix cache: two layers' keys and values of two heads."""
KV_BYTES = 256
"""Bytes that the harness's budget counts for a token of one row."""

CONSTRAINTS = [
    *(
        Constraint("json_schema", json.dumps(SCHEMAS[name]))
        for name in ("flat", "nested", "any short text", "array of objects", "unicode pattern")
    ),
    Constraint("regex", "[a-f]{3,9}(-[0-9]+){2}"),
    Constraint("choice", '["yes", "yesterday", "no"]'),
]
HEADS = [[(7 * i + 11 * head) % 1500 + 20 for i in range(120)] for head in range(2)]
"""Beginnings that prompts share."""


@dataclass(frozen=True)
class RequestKind:
    """A request; hashable, so that its solo answer is computed once. ``resumed`` tokens of it were
    generated elsewhere before."""

    head: int
    shared: int
    own: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    n: int
    stops: int | None
    held_until: int
    logprobs: int | None
    grammar: int | None
    boundary: bool
    resumed: int


@dataclass(frozen=True)
class TimedRequest:
    """A request that comes ``after`` so many turns, and what becomes of it if it has not ended
    ``within`` so many more: it is cancelled, or its text is complete (a stop string)."""

    kind: RequestKind
    after: int
    fate: Literal["cancelled", "complete"] | None
    within: int


def samplings() -> st.SearchStrategy[Sampling]:
    return st.builds(
        Sampling,
        seed=st.integers(0, 2**63 - 1),
        temperature=st.sampled_from([0.0, 0.0, 0.4, 1.0, 2.0]),
        top_p=st.sampled_from([1.0, 0.9, 0.3]),
        top_k=st.sampled_from([0, 0, 1, 40]),
        min_p=st.sampled_from([0.0, 0.0, 0.05]),
        repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.8]),
        presence_penalty=st.sampled_from([0.0, 0.0, 0.7]),
        frequency_penalty=st.sampled_from([0.0, 0.0, 0.4]),
        logit_bias=st.sampled_from([(), (), ((200, 6.0),), ((200, 2.0), (300, -100.0))]),
    )


def kinds() -> st.SearchStrategy[RequestKind]:
    return st.builds(
        RequestKind,
        head=st.integers(0, len(HEADS) - 1),
        shared=st.sampled_from([120, 120, 90, 90, 31, 1, 0]),
        own=st.lists(st.integers(3, 1700), min_size=1, max_size=40).map(tuple),
        sampling=samplings(),
        max_tokens=st.sampled_from([12, 20, 40, 5, 1]),
        n=st.sampled_from([1, 1, 1, 2, 4]),
        stops=st.sampled_from([None, None, 0, 5]),
        held_until=st.sampled_from([0, 4]),
        logprobs=st.sampled_from([None, None, 0, 1, 5]),
        grammar=st.none() | st.none() | st.integers(0, len(CONSTRAINTS) - 1),
        boundary=st.booleans(),
        resumed=st.sampled_from([0, 0, 1, 4]),
    )


def mixes() -> st.SearchStrategy[list[TimedRequest]]:
    visit = st.builds(
        TimedRequest,
        kind=kinds(),
        after=st.sampled_from([0, 0, 0, 0, 1, 2, 6]),
        fate=st.sampled_from([None, None, None, "cancelled", "complete"]),
        within=st.sampled_from([0, 1, 2, 5, 12]),
    )
    return st.lists(visit, min_size=8, max_size=16)


class Oracle:
    """A model, and what each request says on it when it is alone."""

    def __init__(self, folder: Path) -> None:
        self.model = load_model(folder)[0]
        self.width = int(self.model(mx.array([[1]])).shape[-1])
        self._grammars = GrammarCompiler(load_tokenizer(folder), self.width)
        self._compiled: dict[int, CompiledGrammar] = {}
        self._whole: dict[RequestKind, EngineAnswer] = {}

    def whole(self, kind: RequestKind) -> EngineAnswer:
        """The answer from its first token on, alone and cold."""
        if kind not in self._whole:
            [self._whole[kind]] = EngineHarness(self.model, self.width).run([self._ask(kind, [])])
        return self._whole[kind]

    def alone(self, kind: RequestKind) -> list[list[SampledToken]]:
        """Returns the tokens still to come of the request alone, by choice."""
        done = len(self._done(kind))
        whole = self.whole(kind)
        return [whole.sampled[c][done:] for c in range(1 if done else kind.n)]

    def ask(self, kind: RequestKind) -> EngineRequest:
        return self._ask(kind, self._done(kind))

    def _done(self, kind: RequestKind) -> list[int]:
        """Returns the tokens that a continued request had generated before: never all of them."""
        return self.whole(kind).ids()[:-1][: kind.resumed]

    def _ask(self, kind: RequestKind, done: list[int]) -> EngineRequest:
        guided = kind.grammar is not None
        stops = range(3 + kind.stops, self.width, 11) if kind.stops is not None else ()
        stop_ids = frozenset({END}) if guided else frozenset({END, *stops})
        return EngineRequest(
            HEADS[kind.head][: kind.shared] + list(kind.own) + done,
            kind.sampling,
            kind.max_tokens,
            n=1 if done else kind.n,
            generated=len(done),
            stop_ids=stop_ids,
            logprobs=kind.logprobs,
            matcher=self._matcher(kind.grammar, done) if kind.grammar is not None else None,
            boundaries=(kind.shared,) if kind.boundary and kind.shared else (),
            banned=() if guided else tuple(stop_ids),
            banned_until=kind.held_until,
        )

    def _matcher(self, grammar: int, done: list[int]) -> Callable[[], Any]:
        if grammar not in self._compiled:
            self._compiled[grammar] = self._grammars.compile(CONSTRAINTS[grammar])

        def begin() -> Any:
            matcher = self._compiled[grammar].matcher()
            matcher.replay(done)
            return matcher

        return begin


class RequestMix:
    """Visits to one engine, and which of them were cut short."""

    def __init__(self, oracle: Oracle, harness: EngineHarness) -> None:
        self._oracle = oracle
        self._harness = harness
        self._turns = 0
        self._keys: dict[str, TimedRequest] = {}
        self._leave_at: dict[str, int] = {}
        self._cut_short: set[str] = set()

    def run(self, visits: list[TimedRequest]) -> None:
        for visit in visits:
            for _ in range(visit.after):
                self._turn()
            key = self._harness.submit(self._oracle.ask(visit.kind))
            self._keys[key] = visit
            if visit.fate is not None:
                self._leave_at[key] = self._turns + visit.within
        while self._harness.open:
            self._turn()
        self._assert_idle()

    def _turn(self) -> None:
        if not self._harness.open:
            return
        for key in [k for k, at in self._leave_at.items() if at <= self._turns]:
            del self._leave_at[key]
            if key in self._harness.open:
                self._cut(key)
        self._turns += 1
        # An engine that has nothing to do waits for commands, and none would come.
        if self._harness.open:
            self._harness.turn()

    def _cut(self, key: str) -> None:
        self._cut_short.add(key)
        if self._keys[key].fate == "cancelled":
            self._harness.cancel(key)
            return
        answer = self._harness.answers[key]
        for row in self._harness.open.pop(key):
            # Only rows that have said something can be complete; the others are not wanted then.
            self._harness.engine.commands.put(Stop(row))
        if len(answer.sampled) < len(self._oracle.alone(self._keys[key].kind)):
            self._harness.engine.commands.put(CancelCommand(key))

    def _assert_idle(self) -> None:
        self._harness.engine.commands.put(Stop(-1))
        self._harness.turn()
        engine = self._harness.engine
        assert (engine.running, engine.waiting) == (0, 0)

    def check(self) -> None:
        """Whole answers are the solo ones, and others the beginnings of theirs."""
        for key, visit in self._keys.items():
            sampled = self._harness.answers[key].sampled
            for choice, alone in enumerate(self._oracle.alone(visit.kind)):
                told = [replace(d, row=0) for d in sampled.get(choice, [])]
                right = [replace(d, row=0) for d in alone]
                assert told == (right[: len(told)] if key in self._cut_short else right)


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> Oracle:
    return Oracle(tiny_model)


any_mix = given(
    visits=mixes(),
    rows=st.sampled_from([32, 8, 3, 1]),
    chunks=st.builds(FixedChunks, st.sampled_from([2048, 256, 32]), st.sampled_from([512, 32])),
    prefix_tokens=st.sampled_from([300, 800, 100_000, 0]),
    bucketed=st.booleans(),
    pass_cost_tokens=st.sampled_from([float("inf"), 100.0, 0.0]),
    kv_tokens=st.sampled_from([1 << 22, 1 << 22, 400, 100]),
)


def assert_alone_is_together(
    oracle: Oracle,
    visits: list[TimedRequest],
    rows: int,
    chunks: FixedChunks,
    prefix_tokens: int,
    bucketed: bool,
    pass_cost_tokens: float,
    kv_tokens: int,
) -> EngineHarness:
    harness = EngineHarness(
        oracle.model,
        oracle.width,
        chunks=chunks,
        max_rows=rows,
        prefix_bytes=prefix_tokens * TOKEN_BYTES,
        bucketed=bucketed,
        pass_cost_tokens=pass_cost_tokens,
        kv_bytes=kv_tokens * KV_BYTES,
    )
    mix = RequestMix(oracle, harness)
    # So little is counted on that rows outgrow a small budget, and have to make room.
    with mock.patch("mayfly_worker.engine.sequence.RESERVED_TOKENS", 2):
        mix.run(visits)
    mix.check()
    return harness


@any_mix
@settings(max_examples=18, deadline=None)
def test_every_answer_in_a_mix_is_its_solo_cold_one(oracle: Oracle, **mix: Any) -> None:
    assert_alone_is_together(oracle, **mix)


@pytest.mark.long
@any_mix
@settings(max_examples=1000, deadline=None)
def test_every_answer_in_many_mixes_is_its_solo_cold_one(oracle: Oracle, **mix: Any) -> None:
    assert_alone_is_together(oracle, **mix)
