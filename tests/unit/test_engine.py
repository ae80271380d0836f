"""The engine against itself: an answer equals that of the same request alone, whatever runs beside
it.

Exact equality holds with the BLAS that mlx-cpu bundles, with which tests run.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from mayfly_protocol.requests import Sampling
from mayfly_worker.engine.chunks import ChunkSizer
from mayfly_worker.engine.decode import NonFiniteLogits
from mayfly_worker.engine.sequence import YOUNG_TOKENS, Prefilled, Stop
from support.engine_harness import GREEDY, EngineHarness, EngineRequest, FixedChunks

SMALL = FixedChunks(32, 32)


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Any:
    return load_model(tiny_model)[0]


@pytest.fixture(scope="module")
def width(model: Any) -> int:
    return int(model(mx.array([[1]])).shape[-1])


def prompt(rng: random.Random, width: int, length: int) -> list[int]:
    return [rng.randrange(8, width - 8) for _ in range(length)]


def mixed(rng: random.Random, width: int, count: int) -> list[EngineRequest]:
    shared = prompt(rng, width, 80)
    asks = []
    for i in range(count):
        head = shared[: rng.choice([0, 40, 80])]
        asks.append(
            EngineRequest(
                head + prompt(rng, width, rng.choice([1, 2, 17, 33, 150])),
                Sampling(
                    seed=i,
                    temperature=rng.choice([0.0, 0.0, 0.7, 1.0]),
                    top_p=rng.choice([1.0, 0.9]),
                    repetition_penalty=rng.choice([1.0, 1.3]),
                    presence_penalty=rng.choice([0.0, 0.5]),
                    logit_bias=rng.choice([(), ((20, 4.0),)]),
                ),
                max_tokens=rng.choice([1, 3, 12]),
                n=rng.choice([1, 1, 3]),
                logprobs=rng.choice([None, None, 0, 3]),
            )
        )
    return asks


def alone(model: Any, width: int, ask: EngineRequest, **options: Any) -> list[list[int]]:
    [answer] = EngineHarness(model, width, **options).run([ask])
    return [answer.ids(c) for c in range(ask.n)]


@pytest.mark.parametrize("seed", range(2))
def test_B01_a_suspect_is_alone_in_its_passes_until_it_has_got_on(
    model: Any, width: int, seed: int
) -> None:
    """And nobody's answer changes by that."""
    rng = random.Random(seed)
    asks = [replace(ask, max_tokens=30) for ask in mixed(rng, width, 6)]
    asks[2] = replace(asks[2], suspect=True, n=1)
    asks[4] = replace(asks[4], suspect=True, n=3)
    harness = EngineHarness(model, width)
    passes: list[set[str]] = []
    begin = harness.engine._begin_pass

    def record(phase: Any, rows: Any) -> None:
        begin(phase, rows)
        passes.append(set(harness.engine.counters.forward.requests))
        young = {harness._owner[row.id][0] for row in rows if row.suspect and row.young}
        assert not young or passes[-1] == young

    harness.engine._begin_pass = record  # type: ignore[method-assign]
    keys = [harness.submit(ask) for ask in asks]
    harness.finish()
    for key, ask in zip(keys, asks, strict=True):
        assert [harness.answers[key].ids(c) for c in range(ask.n)] == alone(model, width, ask)
    for suspect in (keys[2], keys[4]):
        own = [names for names in passes if suspect in names]
        assert {suspect} in own
        assert any(len(names) > 1 for names in own), "it joins the others"


@pytest.mark.parametrize("seed", range(3))
def test_together_equals_alone(model: Any, width: int, seed: int) -> None:
    asks = mixed(random.Random(seed), width, 10)
    answers = EngineHarness(model, width).run(asks)
    for ask, answer in zip(asks, answers, strict=True):
        assert [answer.ids(c) for c in range(ask.n)] == alone(model, width, ask)


@pytest.mark.parametrize("seed", range(3))
def test_padding_to_a_few_shapes_changes_nothing(model: Any, width: int, seed: int) -> None:
    rng = random.Random(seed)
    asks = mixed(rng, width, 13)
    harness = EngineHarness(model, width, bucketed=True, chunks=ChunkSizer(0.01, 0.01))
    for _ in range(2):  # the second time from the prefix cache, at lengths of all kinds
        answers = harness.run(asks)
        for ask, answer in zip(asks, answers, strict=True):
            assert [answer.ids(c) for c in range(ask.n)] == alone(model, width, ask)


class RecordingChunkSizer(ChunkSizer):
    """A chunk sizer that records the chunks whose shape was planned."""

    def __init__(self) -> None:
        super().__init__(1e6, 1e6)  # however long one takes, the next is no smaller
        self.planned: list[bool] = []

    def measured(self, tokens: int, seconds: float, *, planned: bool = False) -> None:
        self.planned.append(planned)
        super().measured(tokens, seconds, planned=planned)


@pytest.mark.parametrize("bucketed", [False, True])
def test_the_engine_tells_a_shapes_first_run_where_shapes_are_planned(
    model: Any, width: int, bucketed: bool
) -> None:
    rng = random.Random(0)
    chunks = RecordingChunkSizer()
    harness = EngineHarness(model, width, chunks=chunks, bucketed=bucketed, prefix_bytes=0)
    for tokens in (100, 101, 110, 300, 301, 99):  # of two shapes
        harness.run([EngineRequest(prompt(rng, width, tokens), max_tokens=1)])
    harness.run([EngineRequest(prompt(rng, width, 100), max_tokens=1)] * 2)
    firsts = [True, False, False, True, False, False, True]
    assert chunks.planned == (firsts if bucketed else [False] * 7)


@pytest.mark.parametrize("seed", range(2))
def test_staggered_with_cancels_and_small_chunks_equals_alone(
    model: Any, width: int, seed: int
) -> None:
    rng = random.Random(seed)
    harness = EngineHarness(model, width, chunks=SMALL, max_rows=6)
    kept = harness.run_with_cancels(mixed(rng, width, 12), rng, 3)
    for key, ask in kept.items():
        answer = harness.answers[key]
        assert [answer.ids(c) for c in range(ask.n)] == alone(model, width, ask)


def test_a_continuation_goes_on_where_the_lost_run_stopped(model: Any, width: int) -> None:
    rng = random.Random(5)
    for ask in mixed(rng, width, 8):
        ask.n, ask.max_tokens = 1, 12
        [whole] = alone(model, width, ask)
        for k in (1, 6, 11):
            resumed = EngineRequest(
                ask.tokens + whole[:k], ask.sampling, ask.max_tokens, generated=k
            )
            assert alone(model, width, resumed) == [whole[k:]]


def test_a_warm_answer_equals_the_cold_one(model: Any, width: int) -> None:
    rng = random.Random(6)
    harness = EngineHarness(model, width)
    first = EngineRequest(prompt(rng, width, 120))
    cold = alone(model, width, first)
    assert [harness.run([first])[0].ids()] == cold
    [again] = harness.run([first])
    assert (again.ids(), again.cached) == (cold[0], 119)
    longer = EngineRequest(first.tokens + cold[0] + prompt(rng, width, 9))
    [warm] = harness.run([longer])
    assert warm.cached == len(first.tokens) + len(cold[0])
    assert [warm.ids()] == alone(model, width, longer)
    # Two at once from the same entry must not share what they write to.
    others = [EngineRequest(first.tokens + prompt(rng, width, 5)) for _ in range(4)]
    for ask, answer in zip(others, harness.run(others), strict=True):
        assert answer.cached == len(first.tokens)
        assert [answer.ids()] == alone(model, width, ask)


def test_logprobs_are_those_of_the_model(model: Any, width: int) -> None:
    rng = random.Random(7)
    ask = EngineRequest(prompt(rng, width, 20), Sampling(seed=1, temperature=1.0), logprobs=4)
    plain = EngineRequest(prompt(rng, width, 30))
    answer, _ = EngineHarness(model, width).run([ask, plain])
    tokens = list(ask.tokens)
    for sampled in answer.sampled[0]:
        logits = np.array(model(mx.array([tokens]))[0, -1])
        expected = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        assert sampled.logprobs is not None
        assert sampled.logprobs.chosen == pytest.approx(expected[sampled.token], abs=1e-3)
        best = np.argsort(-expected)[:4]
        assert list(sampled.logprobs.ids) == best.tolist()
        assert list(sampled.logprobs.values) == pytest.approx(expected[best].tolist(), abs=1e-3)
        tokens.append(sampled.token)


def test_ends(model: Any, width: int) -> None:
    rng = random.Random(8)
    ask = EngineRequest(prompt(rng, width, 20), max_tokens=10)
    [whole] = alone(model, width, ask)
    stop = whole[4]
    first = whole.index(stop)
    stopped = EngineRequest(ask.tokens, max_tokens=10, stop_ids=frozenset({stop}))
    [answer] = EngineHarness(model, width).run([stopped])
    assert answer.ids() == whole[: first + 1]
    assert answer.sampled[0][-1].end == "stop"
    held = EngineRequest(
        ask.tokens, max_tokens=10, stop_ids=frozenset({stop}), banned=(stop,), banned_until=10
    )
    [answer] = EngineHarness(model, width).run([held])
    assert stop not in answer.ids()
    assert answer.sampled[0][-1].end == "length"


def test_a_row_whose_text_is_complete_leaves(model: Any, width: int) -> None:
    harness = EngineHarness(model, width)
    key = harness.submit(EngineRequest(prompt(random.Random(9), width, 20), max_tokens=1000))
    while not harness.answers[key].ids():
        harness.turn()
    [row] = harness.open.pop(key)
    harness.engine.commands.put(Stop(row))
    harness.turn()
    harness.engine.commands.put(Stop(row))
    harness.turn()
    assert harness.engine.running == 0


def test_admission_is_first_come_first_served_within_its_rows(model: Any, width: int) -> None:
    rng = random.Random(10)
    harness = EngineHarness(model, width, max_rows=2)
    keys = [harness.submit(EngineRequest(prompt(rng, width, 20), max_tokens=5)) for _ in range(5)]
    order: list[str] = []
    while harness.open:
        harness.turn()
        assert harness.engine.running <= 2
        order += [k for k in keys if k not in harness.open and k not in order]
    assert order == keys


def test_logits_that_are_not_finite_are_a_fault(model: Any, width: int) -> None:
    class Poisoned:
        layers = model.layers

        def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
            out: mx.array = model(*args, **kwargs)
            return mx.where(mx.arange(out.shape[0])[:, None, None] == 1, mx.nan, out)

    harness = EngineHarness(Poisoned(), width)
    rng = random.Random(11)
    for _ in range(2):
        harness.submit(EngineRequest(prompt(rng, width, 20)))
    with pytest.raises(NonFiniteLogits) as caught:
        harness.finish()
    assert caught.value.rows == [1]


def test_an_old_request_is_marked_beside_a_new_one(model: Any, width: int) -> None:
    """Though it stands before it in the batch."""
    harness = EngineHarness(model, width)
    rng = random.Random(12)
    old = harness.submit(EngineRequest(prompt(rng, width, 20), max_tokens=40))
    while len(harness.answers[old].ids()) <= YOUNG_TOKENS:
        harness.turn()
    new = harness.submit(EngineRequest(prompt(rng, width, 20), max_tokens=40))
    while not harness.answers[new].ids():
        harness.turn()
    assert harness.engine.suspects_of(RuntimeError()) == ((new,), (old,))


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_R74_a_row_leaves_a_group_in_the_middle_of_its_prompt(
    model: Any, width: int, gone: int
) -> None:
    rng = random.Random(13)
    # The boundaries end the first chunk, which all three are in.
    asks = [EngineRequest(prompt(rng, width, n), boundaries=(n // 2,)) for n in (90, 60, 75)]
    harness = EngineHarness(model, width)
    keys = [harness.submit(ask) for ask in asks]
    harness.engine.turn()
    assert [e.done for e in harness.events if isinstance(e, Prefilled)] == [45, 30, 37]
    harness.cancel(keys[gone])
    harness.turn()
    assert harness.engine.running == 2
    harness.finish()
    for i, (key, ask) in enumerate(zip(keys, asks, strict=True)):
        expected = [] if i == gone else alone(model, width, ask)[0]
        assert harness.answers[key].ids() == expected


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 64, 65, 200])
def test_R109_chunk_borders(model: Any, width: int, length: int) -> None:
    rng = random.Random(length)
    asks = [EngineRequest(prompt(rng, width, length), max_tokens=6) for _ in range(2)]
    whole = [alone(model, width, ask) for ask in asks]
    harness = EngineHarness(model, width, chunks=SMALL)
    assert [[a.ids()] for a in harness.run(asks)] == whole
    assert alone(model, width, asks[0], chunks=SMALL) == whole[0]


def test_greedy_equals_greedy_of_mlx_lm(model: Any, width: int) -> None:
    from mlx_lm.generate import BatchGenerator

    rng = random.Random(12)
    asks = [EngineRequest(prompt(rng, width, n), GREEDY, max_tokens=12) for n in (5, 40, 90)]
    generator = BatchGenerator(model, max_tokens=12)
    uids = generator.insert([a.tokens for a in asks])
    expected: dict[int, list[int]] = {uid: [] for uid in uids}
    while any(len(ids) < 12 for ids in expected.values()):
        for response in generator.next()[1]:
            expected[response.uid].append(response.token)
    generator.close()
    assert [a.ids() for a in EngineHarness(model, width).run(asks)] == [expected[u] for u in uids]


def test_rows_that_outgrow_the_memory_take_turns(
    model: Any, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mayfly_worker.engine.sequence.RESERVED_TOKENS", 10)
    rng = random.Random(13)
    asks = [
        EngineRequest(
            prompt(rng, width, 20),
            Sampling(seed=i, temperature=t, presence_penalty=0.3),
            max_tokens=100,
            logprobs=2,
        )
        for i, t in enumerate((0.0, 0.8, 0.0, 0.8, 0.0))
    ]
    # Room for all of them at first, with a join's copy, and for three of them to the end.
    harness = EngineHarness(model, width, kv_bytes=5 * 80 * 256)
    running = []
    keys = [harness.submit(ask) for ask in asks]
    while harness.open:
        harness.turn()
        running.append(harness.engine.running)
    assert [[harness.answers[key].ids()] for key in keys] == [alone(model, width, a) for a in asks]
    assert running[0] == 5
    assert min(running[: len(running) // 2]) < 5, "nobody had to make room"


@pytest.mark.parametrize("prefilled_anew", [False, True])
def test_a_row_whose_text_is_complete_leaves_though_it_made_room(
    model: Any, width: int, prefilled_anew: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The word that it is complete may find it in the queue, or on its way into the cache."""
    monkeypatch.setattr("mayfly_worker.engine.sequence.RESERVED_TOKENS", 10)
    rng = random.Random(14)
    harness = EngineHarness(
        model, width, kv_bytes=3 * 80 * 256, prefix_bytes=0, chunks=FixedChunks(32, 32)
    )
    keys = [
        harness.submit(EngineRequest(prompt(rng, width, 20), max_tokens=m)) for m in (90, 100, 1000)
    ]
    while harness.engine.counters.rows < len(keys):
        harness.turn()
    while not harness.engine.waiting:
        harness.turn()
    while prefilled_anew and harness.engine.waiting:
        harness.turn()
    assert harness.engine.counters.rows < harness.engine.running or not prefilled_anew
    newest = keys[-1]
    said = harness.answers[newest].ids()
    [row] = harness.open.pop(newest)
    harness.engine.commands.put(Stop(row))
    harness.finish()
    for _ in range(10):
        harness.engine.commands.put(Stop(-1))  # an idle engine would wait for commands
        harness.turn()
    assert (harness.engine.running, harness.engine.waiting) == (0, 0)
    assert harness.answers[newest].ids() == said
