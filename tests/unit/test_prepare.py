"""Choices of a continued request that need no more tokens."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from mayfly_protocol.requests import Ending, Generation, Output, Sampling, TokenPrompt
from mayfly_protocol.serving import Delta, Submit, Usage
from mayfly_worker.engine.admission import Budget
from mayfly_worker.engine.sequence import SampledToken
from mayfly_worker.prepare import Preparer
from mayfly_worker.request_state import RequestState
from support import vocabularies

TOKENIZER = vocabularies.byte_level("thinking")
END = 2
PROMPT = (5, 6, 7)


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(vocabularies.ids_of(text, TOKENIZER))


def begun(submit: Submit, *, context: int = 1000) -> tuple[RequestState, list[Delta]]:
    """A request's state on a worker with such a context, and its first deltas."""
    loaded = SimpleNamespace(
        tokenizer=TOKENIZER,
        probe=SimpleNamespace(width=len(TOKENIZER)),
        card=SimpleNamespace(context=context, sampling={}),
    )
    preparer = Preparer(loaded, Budget(8, 1 << 30, 1), itertools.count())  # type: ignore[arg-type]
    request = RequestState(b"front end", submit, "key")
    request.accept(preparer.prepare(submit))
    return request, request.deltas_of_complete_choices()


def drawn(request: RequestState, row: int, ids: tuple[int, ...]) -> list[Delta]:
    """Returns the deltas of a row's tokens, of which an end token ends it."""
    found = []
    for id in ids:
        delta, _ = request.add_token(
            SampledToken(row, id, "stop" if id == END else None), lambda _: ("", b"")
        )
        found += [delta] if delta is not None else []
    return found


def asked(*, n: int = 1, split: bool = True, stop: tuple[str, ...] = ()) -> Generation:
    return Generation(
        "m", TokenPrompt(PROMPT), Sampling(seed=0), Ending(stop=stop), Output(split=split), n
    )


def words(deltas: list[Delta]) -> tuple[str, str]:
    return "".join(d.text for d in deltas), "".join(d.reasoning for d in deltas)


pieces = st.sampled_from(["<think>", "</think>", "</thi", "word", "wo", "<", " ", "é", "🦄"])


@settings(deadline=None)
@given(st.lists(pieces, min_size=1, max_size=6).map("".join), st.booleans(), st.data())
def test_nothing_is_lost_of_an_answer_that_a_smaller_context_ends(
    text: str, split: bool, data: st.DataObject
) -> None:
    ids = ids_of(text)
    at = data.draw(st.integers(1, len(ids)))
    generation = asked(split=split, stop=("words", "<q", "ééé"))
    first, _ = begun(Submit("r", 1, generation))
    said = drawn(first, first.sequence_ids[0], ids[:at])
    if said[-1].finish:
        return
    resume = tuple(id for delta in said for id in delta.ids)
    second, rest = begun(Submit("r", 2, generation, (resume,)), context=len(PROMPT) + at)
    assert second.finished
    assert [d.finish for d in rest] == ["length"]
    whole, at_once = begun(Submit("r", 1, generation))
    [row] = whole.sequence_ids
    expected = drawn(whole, row, ids[: at - 1])
    last, _ = whole.add_token(SampledToken(row, ids[at - 1], "length"), lambda _: ("", b""))
    assert last is not None
    assert words(said + rest) == words([*at_once, *expected, last])
    assert second.usage() == whole.usage()


def test_thoughts_count_wherever_they_were_thought() -> None:
    answers = [(*ids_of(f"<think>{thought}</think>yes"), END) for thought in ("a b", "c d e f")]
    whole, _ = begun(Submit("r", 1, asked(n=2)))
    rows = whole.sequence_ids
    for row, ids in zip(rows, answers, strict=True):
        drawn(whole, row, ids)
    assert whole.finished
    for at in range(len(answers[1])):
        resume = (answers[0], answers[1][:at])
        second, told = begun(Submit("r", 2, asked(n=2), resume, finished=(0,)))
        assert not told
        drawn(second, second.sequence_ids[0], answers[1][at:])
        assert second.usage() == whole.usage()
    assert whole.usage() == Usage(
        prompt_tokens=len(PROMPT),
        completion_tokens=sum(map(len, answers)),
        reasoning_tokens=sum(len(ids_of(f"{t}</think>")) for t in ("a b", "c d e f")),
    )
