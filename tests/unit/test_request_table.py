"""The request table: suspects run one at a time beside the others, first come first served."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mayfly_protocol.requests import Ending, Generation, Sampling, TextPrompt
from mayfly_protocol.serving import Accepted, Cancel, Failed, Finish, Handover, Submit, Tokens
from mayfly_worker.engine.engine_counters import EngineCounters
from mayfly_worker.engine.sampler import SequenceSampling
from mayfly_worker.engine.sequence import (
    YOUNG_TOKENS,
    CancelCommand,
    SampledToken,
    SequenceFailed,
    SequenceState,
    Start,
    StepResult,
)
from mayfly_worker.prepare import Choice, PreparationDone, PreparedRequest
from mayfly_worker.process import make_beat
from mayfly_worker.request_table import RequestTable
from mayfly_worker.text.choice import TextPiece

PEER = b"front"


class WordText:
    """Stands for a choice's text: every token is a word."""

    reasoning_tokens = 0
    protocol = False
    stop = None

    def feed(self, token: int, *, eos: bool) -> TextPiece:
        return TextPiece(text=f"w{token}", finish="stop" if eos else None)

    def end(self, reason: Any) -> TextPiece:
        return TextPiece(finish=reason)


class TableHarness:
    """A request table between fakes: the test samples the tokens."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.commands: list[Any] = []
        self.unprepared: list[tuple[str, Submit]] | None = None
        """Collects requests to prepare later; None to prepare them at once."""
        self.engine: Any = SimpleNamespace(commands=SimpleNamespace(put=self.commands.append))
        wire: Any = SimpleNamespace(send=lambda peer, message: self.sent.append(message))
        preparation: Any = SimpleNamespace(prepare=self._prepare)
        self.table = RequestTable(
            wire,
            preparation,
            self.engine,
            token_text=lambda token: (f"w{token}", b""),
            max_waiting=100,
        )
        self._sequences = 0
        self.sequences: dict[str, list[int]] = {}

    def submit(self, rid: str, *, suspect: bool = True, n: int = 1, resume: Any = ()) -> None:
        generation = Generation("m", TextPrompt("p"), Sampling(seed=0), Ending(), n=n)
        self.table.receive(PEER, Submit(rid, 1, generation, resume, suspect=suspect))

    def _prepare(self, key: str, submit: Submit) -> None:
        if self.unprepared is not None:
            self.unprepared.append((key, submit))
        else:
            self.prepared(key, submit)

    def prepared(self, key: str, submit: Submit) -> None:
        choices = []
        for index in range(submit.generation.n):
            self._sequences += 1
            before = list(submit.resume[index]) if submit.resume else []
            sequence = SequenceState(
                self._sequences, [1, *before], SequenceSampling(Sampling(seed=0), index), 100
            )
            choices.append(Choice(index, sequence, WordText()))  # type: ignore[arg-type]
        self.sequences[submit.rid] = [choice.sequence.id for choice in choices]
        self.table.preparation_done(PreparationDone(key, PreparedRequest(submit, 1, (), choices)))

    def draw(self, rid: str, count: int, *, choice: int = 0, end: Any = None) -> None:
        sequence = self.sequences[rid][choice]
        for number in range(count):
            last = end if number == count - 1 else None
            self.table.handle_events([StepResult([SampledToken(sequence, 7, last)])])

    @property
    def begun(self) -> list[str]:
        """Requests that the engine was told to start, each once, in order."""
        return list(dict.fromkeys(o.rid for o in self.commands if isinstance(o, Start)))


@pytest.fixture
def harness() -> TableHarness:
    return TableHarness()


def test_a_beat_tells_what_is_still_prepared_from_what_waits_for_the_engine() -> None:
    harness = TableHarness()
    harness.unprepared = later = []
    for rid in ("a", "b", "c"):
        harness.submit(rid, suspect=False)

    def told() -> tuple[int, int]:
        one = make_beat(
            EngineCounters(), harness.table, draining=False, footprint=0, kv_budget=0, refused={}
        )
        return one.waiting, one.preparing

    assert told() == (3, 3)
    harness.prepared(*later[0])
    assert told() == (3, 2)
    harness.table.receive(PEER, Cancel("b", 1))
    assert told() == (2, 1)
    harness.prepared(*later[1])
    harness.prepared(*later[2])
    assert told() == (2, 0)


def test_nothing_follows_the_end_of_a_request_whose_grammar_gave_up(harness: TableHarness) -> None:
    harness.submit("a", suspect=False, n=2)
    harness.submit("b", suspect=False)
    [first, second], [other] = harness.sequences["a"], harness.sequences["b"]
    step = StepResult([SampledToken(first, 7), SampledToken(second, 7), SampledToken(other, 7)])
    harness.table.handle_events(
        [step, SequenceFailed(second, "too much"), SequenceFailed(first, "too much")]
    )
    told = [type(m) for m in harness.sent if not isinstance(m, Accepted)]
    assert told == [Tokens, Failed]
    assert harness.commands[-1] == CancelCommand(harness.commands[0].key)
    assert harness.table.request_ids() == ("b",)


def test_others_are_not_kept_waiting(harness: TableHarness) -> None:
    for rid in ("a", "b", "c"):
        harness.submit(rid, suspect=False)
    harness.submit("s")
    harness.submit("d", suspect=False)
    assert harness.begun == ["a", "b", "c", "s", "d"]


def test_the_next_one_follows_when_a_suspect_has_proven_harmless(harness: TableHarness) -> None:
    for rid in ("s1", "s2", "s3"):
        harness.submit(rid)
    assert harness.begun == ["s1"]
    assert [m.rid for m in harness.sent if isinstance(m, Accepted)] == ["s1", "s2", "s3"]
    harness.draw("s1", YOUNG_TOKENS - 1)
    assert harness.begun == ["s1"]
    harness.draw("s1", 1)
    assert harness.begun == ["s1", "s2"]
    harness.draw("s1", 50)
    assert harness.begun == ["s1", "s2"], "it is counted once"


def test_tokens_drawn_elsewhere_prove_nothing(harness: TableHarness) -> None:
    harness.submit("s1", resume=(tuple(range(40)),))
    harness.submit("s2")
    harness.draw("s1", YOUNG_TOKENS - 1)
    assert harness.begun == ["s1"]
    harness.draw("s1", 1)
    assert harness.begun == ["s1", "s2"]


def test_every_choice_has_to_prove_it(harness: TableHarness) -> None:
    harness.submit("s1", n=2)
    harness.submit("s2")
    harness.draw("s1", 50, choice=0)
    harness.draw("s1", YOUNG_TOKENS - 1, choice=1)
    assert harness.begun == ["s1"]
    harness.draw("s1", 1, choice=1)
    assert harness.begun == ["s1", "s2"]


def test_one_that_ends_makes_room(harness: TableHarness) -> None:
    harness.submit("s1")
    harness.submit("s2")
    harness.draw("s1", 2, end="stop")
    assert [m.rid for m in harness.sent if isinstance(m, Finish)] == ["s1"]
    assert harness.begun == ["s1", "s2"]


def test_one_that_is_cancelled_makes_room_and_never_begins(harness: TableHarness) -> None:
    for rid in ("s1", "s2", "s3"):
        harness.submit(rid)
    harness.table.receive(PEER, Cancel("s2", 1))
    harness.table.receive(PEER, Cancel("s1", 1))
    assert harness.begun == ["s1", "s3"]
    harness.table.peer_lost(PEER)
    assert harness.table.empty


def test_those_that_wait_are_handed_over_like_all(harness: TableHarness) -> None:
    for rid in ("s1", "s2"):
        harness.submit(rid)
    harness.submit("a", suspect=False)
    harness.table.hand_over("shape", suspects=["s1"], marked=["a"], rebuilt=harness.engine)
    assert [m for m in harness.sent if isinstance(m, Handover)] == [
        Handover("s1", 1, "shape", suspect=True, stays=True),
        Handover("s2", 1, "shape", stays=True),
        Handover("a", 1, "shape", marked=True, stays=True),
    ]
    assert harness.begun == ["s1", "a"], "the next one does not begin on a worker that failed"
    harness.submit("s4")
    assert harness.begun[-1] == "s4"
