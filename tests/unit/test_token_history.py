"""DRY, bad words and windows: results depend on a row's tokens alone."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mayfly_protocol.requests import Dry, Sampling
from mayfly_worker.engine.history import (
    CAPACITY_STEP,
    LONGEST_MATCH,
    DryRow,
    RowHistory,
    SequenceBreakers,
    TokenHistory,
)
from mayfly_worker.engine.sampler import RowMemory, Sampler, SequenceSampling

WIDTH = 11
NO_BREAKERS: tuple[tuple[int, tuple[int, ...]], ...] = ()

tokens_of = st.lists(st.integers(0, 3), min_size=1, max_size=24)
breakers_of = st.sampled_from([NO_BREAKERS, ((3, ()),), ((3, ()), (2, (1,))), ((0, (1, 2)),)])


def breakers(sequences: tuple[tuple[int, tuple[int, ...]], ...]) -> SequenceBreakers:
    """Breakers from pairs of a first token and the tokens after it."""
    return SequenceBreakers.of({tail: [head] for head, tail in sequences}, WIDTH)


def reference(
    tokens: list[int], dry: DryRow, sequences: tuple[tuple[int, tuple[int, ...]], ...]
) -> list[float]:
    """DRY's penalties by comparing every earlier text with the end of the tokens."""
    seen = tokens[max(0, len(tokens) - dry.window) :]
    unbroken = len(tokens)
    for end in range(1, len(tokens) + 1):
        for head, tail in sequences:
            if tokens[:end][-1 - len(tail) :] == [head, *tail]:
                unbroken = len(tokens) - end
    penalties = [0.0] * WIDTH
    for at in range(len(seen) - 1):
        length = 0
        while length <= at and seen[at - length] == seen[-1 - length]:
            length += 1
        length = min(length, unbroken)
        if length >= dry.allowed:
            penalty = dry.multiplier * dry.base ** (length - dry.allowed)
            penalties[seen[at + 1]] = max(penalties[seen[at + 1]], penalty)
    return penalties


@settings(deadline=None, max_examples=120)
@given(
    tokens_of,
    tokens_of,
    breakers_of,
    st.sampled_from([1, 3, 8, 1000]),
    st.integers(1, 3),
    st.integers(0, 24),
)
def test_dry_penalizes_what_extends_a_repetition(
    prompt: list[int],
    answer: list[int],
    sequences: tuple[tuple[int, tuple[int, ...]], ...],
    window: int,
    allowed: int,
    moved: int,
) -> None:
    """At each step, and after a move to another worker at any step."""
    dry = DryRow(0.8, 1.75, allowed, window, breakers(sequences))
    history = TokenHistory([RowHistory.of(prompt, 0, dry)], WIDTH, {0: dry}, [])
    for position in range(len(answer) + 1):
        tokens = prompt + answer[:position]
        if position == moved:
            history = TokenHistory([RowHistory.of(tokens, position, dry)], WIDTH, {0: dry}, [])
        found = np.array(history.repetition_penalties([position]))[0]
        assert np.allclose(found, reference(tokens, dry, sequences), rtol=1e-5)
        if position < len(answer):
            history.extend(mx.array([answer[position]]), [position])


def test_histories_grow_and_long_repetitions_count_as_equally_long() -> None:
    dry = DryRow(1.0, 2.0, 2, 2**31 - 1, breakers(NO_BREAKERS))
    history = TokenHistory([RowHistory.of([1], 0, dry)], WIDTH, {0: dry}, [])
    steps = LONGEST_MATCH + 2 * CAPACITY_STEP
    for position in range(steps):
        history.extend(mx.array([1]), [position])
    moved = RowHistory.of([1] * (steps + 1), steps, dry)
    again = TokenHistory([moved], WIDTH, {0: dry}, [])
    found = np.array(history.repetition_penalties([steps]))
    assert np.array_equal(found, np.array(again.repetition_penalties([steps])))
    assert found[0, 1] == 1e9 and not found[0, 2:].any()


def dry_row(seed: int, **more: float) -> SequenceSampling:
    sampling = Sampling(seed=seed, temperature=0.8, dry=Dry(0.8, allowed_length=1), **more)  # type: ignore[arg-type]
    return SequenceSampling(sampling, breakers=breakers(((3, ()),)))


ROWS = {
    "plain": SequenceSampling(Sampling(seed=1)),
    "dry": dry_row(2),
    "dry with penalties": dry_row(3, frequency_penalty=0.5, presence_window=3, presence_penalty=1),
    "window": SequenceSampling(Sampling(seed=4, repetition_penalty=1.5, repetition_window=5)),
    "words": SequenceSampling(Sampling(seed=5), bad_words=((7,), (1, 2), (4, 4, 4))),
    "xtc": SequenceSampling(Sampling(seed=6, xtc_probability=0.5, xtc_threshold=0.05)),
    "typical": SequenceSampling(Sampling(seed=7, typical_p=0.7, top_n_sigma=1.5)),
    "allowed": SequenceSampling(Sampling(seed=8, allowed_ids=(1, 2, 5)), bad_words=((1, 2),)),
    "greedy": SequenceSampling(Sampling(seed=9, temperature=0.0, xtc_probability=1.0)),
}


def logits(position: int, row: int) -> mx.array:
    drawn = np.random.default_rng([position, row]).normal(0, 1.5, WIDTH)
    return mx.array(drawn.astype(np.float32))


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.sampled_from(sorted(ROWS)), min_size=1, max_size=6),
    st.lists(tokens_of, min_size=6, max_size=6),
    st.integers(0, 11),
    st.integers(0, 11),
)
def test_batched_alone_and_continued_are_the_same(
    names: list[str], prompts: list[list[int]], left: int, moved: int
) -> None:
    """Rows draw the same alone, in a batch that the first row leaves, and from a state that is made
    from their tokens."""
    rows = [ROWS[name] for name in names]
    steps = 12

    def begin(number: int, tokens: list[int], generated: int) -> RowMemory:
        return RowMemory.of(rows[number], tokens, generated, WIDTH)

    alone = []
    for i, row in enumerate(rows):
        sampler = Sampler([row], WIDTH, [begin(i, prompts[i], 0)])
        alone.append([sampler(logits(p, i)[None], [p]).item() for p in range(steps)])

    running = list(range(len(rows)))
    batch = Sampler(rows, WIDTH, [begin(i, prompts[i], 0) for i in running])
    for position in range(steps):
        if position == left and len(running) > 1:
            memories = [batch.memory_of(k) for k in range(1, len(running))]
            running = running[1:]
            batch = Sampler([rows[i] for i in running], WIDTH, memories)
        if position == moved:
            batch = Sampler(
                [rows[i] for i in running],
                WIDTH,
                [begin(i, prompts[i] + alone[i][:position], position) for i in running],  # type: ignore[arg-type]
            )
        x = mx.stack([logits(position, i) for i in running])
        assert batch(x, [position] * len(running)).tolist() == [alone[i][position] for i in running]


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 1000))
def test_bad_words_are_never_generated(seed: int) -> None:
    words = ((7,), (1, 2), (4, 4, 4))
    row = SequenceSampling(Sampling(seed=seed, temperature=2.0), bad_words=words)
    prompt = [4, 4, 1]
    sampler = Sampler([row], WIDTH, [RowMemory.of(row, prompt, 0, WIDTH)])
    drawn = [sampler(logits(0, 0)[None], [p]).item() for p in range(120)]
    for word in words:
        found = [tuple(drawn[i : i + len(word)]) for i in range(len(drawn))]
        assert word not in found
    assert {1, 2, 4} <= set(drawn), "each is drawn elsewhere"


def test_a_bad_word_that_begins_in_the_prompt_is_none() -> None:
    row = SequenceSampling(Sampling(seed=0, temperature=0.0), bad_words=((1, 2),))
    x = mx.array([[0.0, 0.0, 5.0, 4.0]])
    assert Sampler([row], 4, [RowMemory.of(row, [1], 0, 4)])(x, [0]).item() == 2
    assert Sampler([row], 4, [RowMemory.of(row, [0, 1], 1, 4)])(x, [1]).item() == 3


def test_dry_keeps_a_greedy_row_from_repeating_itself() -> None:
    x = mx.array([[0.0, 2.0, 1.0, 0.5]])
    plain = SequenceSampling(Sampling(seed=0, temperature=0.0))
    sampler = Sampler([plain], 4, [RowMemory.of(plain, [0], 0, 4)])
    assert [sampler(x, [p]).item() for p in range(5)] == [1] * 5
    dry = SequenceSampling(
        Sampling(seed=0, temperature=0.0, dry=Dry(3.0)),
        breakers=SequenceBreakers.of({}, 4),
    )
    sampler = Sampler([dry], 4, [RowMemory.of(dry, [0], 0, 4)])
    assert [sampler(x, [p]).item() for p in range(5)] == [1, 1, 1, 2, 1]
