"""Suspects run one at a time beside the others, first come first served."""

from __future__ import annotations

from typing import Any

import pytest

from mayfly_protocol.requests import Ending, Generation, Sampling, TextPrompt
from mayfly_protocol.serving import Accepted, Cancel, Failed, Finish, Handover, Submit, Tokens
from mayfly_worker.engine.engine_counters import EngineCounters
from mayfly_worker.engine.sampler import SequenceSampling
from mayfly_worker.engine.sequence import (
    YOUNG_TOKENS,
    SampledToken,
    SequenceFailed,
    SequenceState,
    Start,
    StepResult,
)
from mayfly_worker.engine.sequence import Cancel as EngineCancel
from mayfly_worker.prepare import Choice, Prepared
from mayfly_worker.process import beat
from mayfly_worker.requests import Desk
from mayfly_worker.text.choice import TextPiece

PEER = b"front"


class Words:
    """Stands for a choice's text: every token is a word."""

    reasoning_tokens = 0

    stop = None

    def feed(self, token: int, *, eos: bool) -> TextPiece:
        return TextPiece(text=f"w{token}", finish="stop" if eos else None)

    def end(self, reason: Any) -> TextPiece:
        return TextPiece(finish=reason)


class Office:
    """A desk with nobody behind it: the test draws the tokens."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.ordered: list[Any] = []
        self.inquiries: list[Any] = []
        self.desk = Desk(
            send=lambda peer, message: self.sent.append(message),
            order=self.ordered.append,
            prepare=lambda key, submit: self.prepared(key, submit),
            inquire=lambda peer, inquiry: self.inquiries.append(inquiry),
            token_text=lambda token: (f"w{token}", b""),
            max_waiting=100,
        )
        self._rows = 0
        self.rows: dict[str, list[int]] = {}

    def submit(self, rid: str, *, suspect: bool = True, n: int = 1, resume: Any = ()) -> None:
        generation = Generation("m", TextPrompt("p"), Sampling(seed=0), Ending(), n=n)
        self.desk.received(PEER, Submit(rid, 1, generation, resume, suspect=suspect))

    def prepared(self, key: str, submit: Submit) -> None:
        choices = []
        for index in range(submit.generation.n):
            self._rows += 1
            before = list(submit.resume[index]) if submit.resume else []
            row = SequenceState(
                self._rows, [1, *before], SequenceSampling(Sampling(seed=0), index), 100
            )
            choices.append(Choice(index, row, Words()))  # type: ignore[arg-type]
        self.rows[submit.rid] = [choice.row.id for choice in choices]
        self.desk.prepared(key, Prepared(submit, 1, (), choices))

    def draw(self, rid: str, count: int, *, choice: int = 0, end: Any = None) -> None:
        row = self.rows[rid][choice]
        for number in range(count):
            last = end if number == count - 1 else None
            self.desk.happened([StepResult([SampledToken(row, 7, last)])])

    @property
    def begun(self) -> list[str]:
        """Requests that the engine was told to start, each once, in order."""
        return list(dict.fromkeys(o.rid for o in self.ordered if isinstance(o, Start)))


@pytest.fixture
def office() -> Office:
    return Office()


def test_a_beat_tells_what_is_still_prepared_from_what_waits_for_the_engine() -> None:
    office, later = Office(), list[tuple[str, Submit]]()
    office.desk._prepare = lambda key, submit: later.append((key, submit))
    for rid in ("a", "b", "c"):
        office.submit(rid, suspect=False)

    def told() -> tuple[int, int]:
        one = beat(
            EngineCounters(), office.desk, leaving=False, footprint=0, kv_budget=0, refused={}
        )
        return one.waiting, one.preparing

    assert told() == (3, 3)
    office.prepared(*later[0])
    assert told() == (3, 2)
    office.desk.received(PEER, Cancel("b", 1))
    assert told() == (2, 1)
    office.prepared(*later[1])
    office.prepared(*later[2])
    assert told() == (2, 0)


def test_nothing_follows_the_end_of_a_request_whose_grammar_gave_up(office: Office) -> None:
    office.submit("a", suspect=False, n=2)
    office.submit("b", suspect=False)
    [first, second], [other] = office.rows["a"], office.rows["b"]
    step = StepResult([SampledToken(first, 7), SampledToken(second, 7), SampledToken(other, 7)])
    office.desk.happened(
        [step, SequenceFailed(second, "too much"), SequenceFailed(first, "too much")]
    )
    told = [type(m) for m in office.sent if not isinstance(m, Accepted)]
    assert told == [Tokens, Failed]
    assert office.ordered[-1] == EngineCancel(office.ordered[0].key)
    assert office.desk.requests() == ("b",)


def test_others_are_not_kept_waiting(office: Office) -> None:
    for rid in ("a", "b", "c"):
        office.submit(rid, suspect=False)
    office.submit("s")
    office.submit("d", suspect=False)
    assert office.begun == ["a", "b", "c", "s", "d"]


def test_the_next_one_follows_when_a_suspect_has_proven_harmless(office: Office) -> None:
    for rid in ("s1", "s2", "s3"):
        office.submit(rid)
    assert office.begun == ["s1"]
    assert [m.rid for m in office.sent if isinstance(m, Accepted)] == ["s1", "s2", "s3"]
    office.draw("s1", YOUNG_TOKENS - 1)
    assert office.begun == ["s1"]
    office.draw("s1", 1)
    assert office.begun == ["s1", "s2"]
    office.draw("s1", 50)
    assert office.begun == ["s1", "s2"], "it is counted once"


def test_tokens_drawn_elsewhere_prove_nothing(office: Office) -> None:
    office.submit("s1", resume=(tuple(range(40)),))
    office.submit("s2")
    office.draw("s1", YOUNG_TOKENS - 1)
    assert office.begun == ["s1"]
    office.draw("s1", 1)
    assert office.begun == ["s1", "s2"]


def test_every_choice_has_to_prove_it(office: Office) -> None:
    office.submit("s1", n=2)
    office.submit("s2")
    office.draw("s1", 50, choice=0)
    office.draw("s1", YOUNG_TOKENS - 1, choice=1)
    assert office.begun == ["s1"]
    office.draw("s1", 1, choice=1)
    assert office.begun == ["s1", "s2"]


def test_one_that_ends_makes_room(office: Office) -> None:
    office.submit("s1")
    office.submit("s2")
    office.draw("s1", 2, end="stop")
    assert [m.rid for m in office.sent if isinstance(m, Finish)] == ["s1"]
    assert office.begun == ["s1", "s2"]


def test_one_that_is_cancelled_makes_room_and_never_begins(office: Office) -> None:
    for rid in ("s1", "s2", "s3"):
        office.submit(rid)
    office.desk.received(PEER, Cancel("s2", 1))
    office.desk.received(PEER, Cancel("s1", 1))
    assert office.begun == ["s1", "s3"]
    office.desk.peer_lost(PEER)
    assert office.desk.empty


def test_those_that_wait_are_handed_over_like_all(office: Office) -> None:
    for rid in ("s1", "s2"):
        office.submit(rid)
    office.submit("a", suspect=False)
    office.desk.hand_over("shape", suspects=["s1"], marked=["a"], stays=True)
    assert [m for m in office.sent if isinstance(m, Handover)] == [
        Handover("s1", 1, "shape", suspect=True, stays=True),
        Handover("s2", 1, "shape", stays=True),
        Handover("a", 1, "shape", marked=True, stays=True),
    ]
    assert office.begun == ["s1", "a"], "the next one does not begin on a worker that failed"
    office.submit("s4")
    assert office.begun[-1] == "s4"
