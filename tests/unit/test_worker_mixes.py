"""Random mixes in a real worker process: text, stops and cancels on top of what the engine draws.

As in :mod:`test_engine_mixes`, the oracle is the same request alone and cold: on a second worker
that runs one row at a time and keeps no prefixes. Stop strings are cut out of what the model says
without them, so that they are met, in the middle of tokens too; where they end a text is worked out
here once more from the whole text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mayfly_protocol.lifecycle import Beat
from mayfly_protocol.requests import ChatPrompt, Constraint, Generation
from mayfly_protocol.serving import Cancel, Finish
from support.worker import AttemptAnswer, WorkerProcess, generation

HEAD = "The committee met on Tuesday to hear the report about bridges, tunnels and ferries. " * 3
CONSTRAINTS = (
    Constraint("regex", "(ab|cd){2,8}[0-9]{2}"),
    Constraint("json_schema", '{"type": "array", "items": {"enum": ["é", "日本"]}, "maxItems": 4}'),
)


@dataclass(frozen=True)
class MixedRequest:
    """Stops are (place, length) in what the model would say without them."""

    tail: str
    long: bool
    chat: bool
    max_tokens: int
    n: int
    seed: int
    temperature: float
    penalty: float
    constraint: int | None
    ignore_eos: bool
    logprobs: int | None
    stops: tuple[tuple[int, int], ...]
    include_stop: bool
    min_tokens: int
    cancel_at: int | None

    def wanted(self, stop: tuple[str, ...] = ()) -> Generation:
        text = (HEAD if self.long else "") + self.tail
        return generation(
            ChatPrompt(({"role": "user", "content": text},)) if self.chat else text,
            n=self.n,
            seed=self.seed,
            temperature=self.temperature,
            presence_penalty=self.penalty,
            max_tokens=self.max_tokens,
            min_tokens=min(self.min_tokens, self.max_tokens),
            ignore_eos=self.ignore_eos,
            logprobs=self.logprobs,
            split=self.chat,
            constraint=None if self.constraint is None else CONSTRAINTS[self.constraint],
            stop=stop,
            include_stop=self.include_stop,
        )


def requests() -> st.SearchStrategy[MixedRequest]:
    return st.builds(
        MixedRequest,
        tail=st.sampled_from(["Story", "Report 7", "naïve 日本", "x" * 40, "And then"]),
        long=st.booleans(),
        chat=st.booleans(),
        max_tokens=st.sampled_from([40, 25, 60, 1]),
        n=st.sampled_from([1, 1, 3]),
        seed=st.integers(0, 5),
        temperature=st.sampled_from([0.0, 0.8, 1.5]),
        penalty=st.sampled_from([0.0, 0.5]),
        constraint=st.sampled_from([None, None, None, 0, 1]),
        ignore_eos=st.booleans(),
        logprobs=st.sampled_from([None, None, 2]),
        stops=st.lists(
            st.tuples(st.integers(0, 120), st.integers(1, 9)), min_size=0, max_size=4
        ).map(tuple),
        include_stop=st.booleans(),
        min_tokens=st.sampled_from([0, 0, 6]),
        cancel_at=st.sampled_from([None, None, None, 0, 3, 15]),
    )


def deltas_of(answer: AttemptAnswer, choice: int) -> list[Any]:
    """Returns the deltas of a choice, without the fields that name the attempt."""
    return [replace(d, rid="", attempt=0) for d in answer.deltas if d.choice == choice]


def cut(whole: str, stops: tuple[str, ...], include: bool) -> str:
    """Cuts a text at the first of its stops to be complete, the longest of several."""
    ends = [(whole.find(s) + len(s), -len(s)) for s in stops if s in whole]
    if not ends:
        return whole
    end, length = min(ends)
    return whole[: end if include else end + length]


class WorkerPair:
    """``busy`` runs the mixes; ``alone`` is asked for one answer at a time, and each once."""

    def __init__(self, busy: WorkerProcess, alone: WorkerProcess) -> None:
        self.busy = busy
        self._alone = alone
        self._known: dict[str, AttemptAnswer] = {}

    def whole(self, request: MixedRequest) -> str:
        """Returns the first choice's text without stops."""
        return self.alone(request.wanted()).text()

    def stops(self, request: MixedRequest) -> tuple[str, ...]:
        whole = self.whole(request)
        return tuple(whole[i : i + n] for i, n in request.stops if whole[i : i + n])

    def alone(self, wanted: Generation) -> AttemptAnswer:
        key = repr(wanted)
        if key not in self._known:
            self._known[key] = self._alone.ask(wanted)
        return self._known[key]


@pytest.fixture(scope="module")
def workers(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerPair]:
    folder = tmp_path_factory.mktemp("workers")
    with (
        WorkerProcess(tiny_model, folder, max_rows=1, prefix_cache=1) as alone,
        WorkerProcess(
            tiny_model,
            folder,
            max_rows=6,
            beat_interval_s=0.05,
            # Room for two of the long prompts, and the smallest of chunks.
            prefix_cache=100_000,
            prefill_alone_s=1e-6,
            prefill_shared_s=1e-6,
        ) as busy,
    ):
        alone.wait_ready()
        busy.wait_ready()
        yield WorkerPair(busy, alone)


def run(
    workers: WorkerPair, mix: list[MixedRequest]
) -> list[tuple[MixedRequest, tuple[str, ...], AttemptAnswer]]:
    """Sends everything at once, and cancels when so many tokens have come; returns when all has
    ended."""
    busy = workers.busy
    asked = [(r, workers.stops(r)) for r in mix]
    running = [(r, stop, busy.submit(r.wanted(stop))) for r, stop in asked]
    doomed = [(r.cancel_at, answer) for r, _, answer in running if r.cancel_at is not None]

    def over() -> bool:
        for entry in [e for e in doomed if len(e[1].ids()) >= e[0]]:
            doomed.remove(entry)
            busy.send(Cancel(entry[1].rid, 1))
        return all(answer.end for _, _, answer in running)

    busy.wait(over, "every answer")
    return running


def check(
    workers: WorkerPair, request: MixedRequest, stop: tuple[str, ...], answer: AttemptAnswer
) -> None:
    right = workers.alone(request.wanted(stop))
    assert isinstance(answer.end, Finish)
    assert isinstance(right.end, Finish)
    if answer.end.reason == "cancelled":
        assert request.cancel_at is not None
        for choice in range(request.n):
            so_far = deltas_of(answer, choice)
            assert so_far == deltas_of(right, choice)[: len(so_far)]
        return
    for choice in range(request.n):
        assert deltas_of(answer, choice) == deltas_of(right, choice)
    assert answer.end.usage.completion_tokens == right.end.usage.completion_tokens
    assert answer.end.usage.prompt_tokens == right.end.usage.prompt_tokens
    assert answer.end.usage.cached_tokens <= answer.end.usage.prompt_tokens
    assert answer.end.usage.completion_tokens == sum(len(answer.ids(c)) for c in range(request.n))
    if request.min_tokens == 0:
        expected = cut(workers.whole(request), stop, request.include_stop)
        assert answer.text() == expected


def assert_alone_is_together(workers: WorkerPair, mix: list[MixedRequest]) -> None:
    for request, stop, answer in run(workers, mix):
        check(workers, request, stop, answer)
    seen = len(workers.busy.received)
    workers.busy.wait(
        lambda: [
            m
            for m in workers.busy.received[seen:]
            if isinstance(m, Beat) and m.running == m.waiting == 0 and m.phase == "idle"
        ],
        "an idle worker",
    )


@pytest.mark.process
@given(mix=st.lists(requests(), min_size=4, max_size=10))
@settings(max_examples=10, deadline=None)
def test_every_text_in_a_mix_is_its_solo_cold_one(
    workers: WorkerPair, mix: list[MixedRequest]
) -> None:
    assert_alone_is_together(workers, mix)


@pytest.mark.process
@pytest.mark.long
@given(mix=st.lists(requests(), min_size=4, max_size=12))
@settings(max_examples=200, deadline=None)
def test_every_text_in_many_mixes_is_its_solo_cold_one(
    workers: WorkerPair, mix: list[MixedRequest]
) -> None:
    assert_alone_is_together(workers, mix)
