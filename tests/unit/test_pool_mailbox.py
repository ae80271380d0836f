"""The mailbox of a reader: order, joined messages, and size."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mayfly_protocol.serving import Accepted, Delta, TokenLogprob, ToolCallDelta
from mayfly_server.dispatch.mailbox import MAX_IDS, UNMERGED, Mailbox, merge_deltas, size_of

A = Delta("r", 1, 0, 0, ids=(1,), text="a")
B = Delta("r", 1, 0, 1, ids=(2,), text="b", finish="stop")


async def test_a_reader_gets_all_there_is_in_order() -> None:
    mailbox: Mailbox[int] = Mailbox()
    for number in range(3):
        mailbox.put(number)
    assert await mailbox.take(1.0) == [0, 1, 2]
    assert await mailbox.take(0.01) == []
    asyncio.get_running_loop().call_soon(mailbox.put, 3)
    assert await mailbox.take(1.0) == [3]


async def test_a_writer_can_wait_for_its_reader() -> None:
    mailbox: Mailbox[int] = Mailbox()
    await mailbox.taken()
    mailbox.put(1)
    waiting = asyncio.create_task(mailbox.taken())
    await asyncio.sleep(0)
    assert not waiting.done()
    await mailbox.take(1.0)
    await waiting


async def test_what_waits_is_joined_and_bounded() -> None:
    cries: list[int] = []
    mailbox: Mailbox[str] = Mailbox(
        merge=lambda last, new: last + new if last < "x" else None,
        size=len,
        limit=UNMERGED + 4,
        on_overfull=lambda: cries.append(1),
    )
    for _ in range(UNMERGED):
        mailbox.put("-")
    for piece in ("ab", "c", "x"):
        mailbox.put(piece)
    assert cries == []
    mailbox.put("y")
    assert cries == [1]
    assert await mailbox.take(1.0) == ["-"] * UNMERGED + ["abcxy"]
    mailbox.put("-" * (UNMERGED + 4))
    assert cries == [1], "counted anew"


def test_two_deltas_that_follow_each_other_are_one() -> None:
    joined = merge_deltas(A, B)
    assert joined == Delta("r", 1, 0, 0, ids=(1, 2), text="ab", finish="stop")


CALL = ToolCallDelta(0, "{", "id", "f")


@pytest.mark.parametrize(
    ("last", "new"),
    [
        (A, replace(B, choice=1)),
        (A, replace(B, attempt=2)),
        (A, replace(B, index=0)),
        (A, replace(B, index=2)),
        (B, replace(A, index=2)),
        (A, replace(B, tool_calls=(CALL,))),
        (replace(A, tool_calls=(CALL,)), B),
        (A, replace(B, text="", reasoning="thought")),
        (replace(A, ids=(1,) * MAX_IDS), replace(B, index=MAX_IDS)),
        (Accepted("r", 1, 7), A),
        (A, Accepted("r", 1, 7)),
    ],
)
def test_others_stay_apart(last: object, new: object) -> None:
    assert merge_deltas(last, new) is None  # type: ignore[arg-type]


def test_pieces_of_a_call_are_joined() -> None:
    last = replace(A, text="", tool_calls=(CALL, ToolCallDelta(0, '"a"')))
    new = replace(B, text="", tool_calls=(ToolCallDelta(0, ": 1}"), replace(CALL, index=1)))
    joined = merge_deltas(last, new)
    assert isinstance(joined, Delta)
    assert joined.tool_calls == (CALL, ToolCallDelta(0, '"a": 1}'), replace(CALL, index=1))
    unfinished = replace(B, text="", tool_calls=(ToolCallDelta(0, "", unfinished=True),))
    joined = merge_deltas(last, unfinished)
    assert isinstance(joined, Delta)
    assert joined.tool_calls[-1] == ToolCallDelta(0, '"a"', unfinished=True)


@given(st.data())
def test_joined_deltas_say_the_same_in_the_same_order(data: st.DataObject) -> None:
    logprob = TokenLogprob(1, "t", b"t", -1.0)
    deltas: list[Delta] = []
    at = {0: 0, 1: 0}
    for number in range(data.draw(st.integers(1, 12))):
        choice = data.draw(st.sampled_from([0, 0, 0, 1]))
        ids = tuple(range(at[choice], at[choice] + data.draw(st.integers(1, 3))))
        text = data.draw(st.sampled_from(["", f"<{number}>"]))
        thought = "" if text else data.draw(st.sampled_from(["", f"({number})"]))
        logprobs = (logprob,) * len(ids) if data.draw(st.booleans()) else ()
        deltas.append(
            Delta("r", 1, choice, at[choice], ids, text, reasoning=thought, logprobs=logprobs)
        )
        at[choice] += len(ids)
    kept: list[Delta] = []
    for delta in deltas:
        joined = merge_deltas(kept[-1], delta) if kept else None
        if joined is None:
            kept.append(delta)
        else:
            assert isinstance(joined, Delta)
            kept[-1] = joined
    for choice in (0, 1):
        before = [d for d in deltas if d.choice == choice]
        after = [d for d in kept if d.choice == choice]
        assert [i for d in after for i in d.ids] == [i for d in before for i in d.ids]
        assert [d.index for d in after] == [
            sum(len(e.ids) for e in after[:n]) for n in range(len(after))
        ]
        # A chunk says its thought before its text.
        said = ["".join(d.reasoning + d.text for d in each) for each in (before, after)]
        assert said[0] == said[1]
        assert sum(len(d.logprobs) for d in after) == sum(len(d.logprobs) for d in before)
    assert sum(map(size_of, kept)) == sum(map(size_of, deltas))


def test_log_probabilities_weigh_more() -> None:
    rich = replace(A, logprobs=(TokenLogprob(1, "t", b"t", -1.0, ()),))
    assert size_of(rich) > size_of(A) > 0
    assert size_of(Accepted("r", 1, 7)) > 0
