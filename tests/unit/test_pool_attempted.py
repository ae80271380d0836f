"""Delivery to a client while workers come and go: each token exactly once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mayfly_protocol.requests import Constraint, Generation, Output, Sampling, TextPrompt
from mayfly_protocol.serving import (
    Accepted,
    Delta,
    Failed,
    Finish,
    Handover,
    Progress,
    Rejected,
    Submit,
    ToolCallDelta,
    Usage,
)
from mayfly_server.dispatch.mailbox import Lost
from mayfly_server.dispatch.request_progress import Ended, RequestProgress, Retry
from mayfly_server.errors import ContextExceeded, InvalidRequest, RequestFailed

GENERATION = Generation("m", TextPrompt("p"), Sampling(seed=1))


def begun(n: int = 1) -> tuple[RequestProgress, Submit]:
    attempted = RequestProgress("r", replace(GENERATION, n=n))
    submit = attempted.submit()
    assert attempted.receive(Accepted("r", 1, 7)) is None
    return attempted, submit


def delta(submit: Submit, index: int, *, choice: int = 0, **more: object) -> Delta:
    fields = {"ids": (100 + index,), "text": f"t{index}"} | more
    return Delta(submit.rid, submit.attempt, choice, index, **fields)  # type: ignore[arg-type]


def test_a_request_that_nothing_happens_to() -> None:
    attempted, submit = begun()
    assert submit == Submit("r", 1, GENERATION)
    first, second = delta(submit, 0), delta(submit, 1, finish="stop")
    assert attempted.receive(first) == first
    assert attempted.receive(second) == second
    ended = attempted.receive(Finish("r", 1, "done", Usage(7, 2, 3, 1)))
    assert ended == Ended(Usage(7, 2, 3, 1))


def test_a_lost_request_is_resumed_from_what_was_delivered() -> None:
    attempted, submit = begun(n=2)
    attempted.receive(delta(submit, 0))
    attempted.receive(delta(submit, 1))
    attempted.receive(delta(submit, 0, choice=1, finish="stop"))
    assert attempted.receive(Lost("killed")) == Retry("lost", in_failed_pass=None)
    again = attempted.submit()
    assert (again.attempt, again.resume, again.finished) == (2, ((100, 101), (100,)), (1,))
    attempted.receive(Accepted("r", 2, 7))
    last = delta(again, 2, finish="length")
    assert attempted.receive(last) == last
    assert attempted.receive(Finish("r", 2, "done")) == Ended(Usage(7, 4))


def test_before_the_first_token_there_is_nothing_to_resume() -> None:
    attempted, _ = begun()
    attempted.receive(Lost("killed"))
    assert attempted.submit() == Submit("r", 2, GENERATION)


@pytest.mark.parametrize("index", [0, 2, 5])
def test_a_gap_or_a_repeat_ends_the_attempt(index: int) -> None:
    attempted, submit = begun()
    attempted.receive(delta(submit, 0))
    assert attempted.receive(delta(submit, index)) == Retry("gap")
    assert attempted.submit().resume == ((100,),)


def test_a_call_that_is_begun_anew_ends_the_attempt() -> None:
    """An older worker sends calls as a whole, also to continue in the middle of one."""
    attempted, submit = begun()
    begin = ToolCallDelta(0, "{", "c0", "f")
    attempted.receive(delta(submit, 0, tool_calls=(begin,)))
    attempted.receive(delta(submit, 1, tool_calls=(ToolCallDelta(0, "}"), replace(begin, index=1))))
    whole = (replace(begin, index=1, arguments="{}"),)
    assert attempted.receive(delta(submit, 2, tool_calls=whole)) == Retry("gap")
    assert attempted.submit().resume == ((100, 101),)


def test_nothing_comes_after_a_choices_end() -> None:
    attempted, submit = begun(n=2)
    attempted.receive(delta(submit, 0, finish="stop"))
    assert attempted.receive(delta(submit, 1)) == Retry("gap")


def test_tokens_before_an_acceptance_are_out_of_turn() -> None:
    attempted = RequestProgress("r", GENERATION)
    submit = attempted.submit()
    assert attempted.receive(delta(submit, 0)) == Retry("out of turn")


def test_no_such_choice() -> None:
    attempted, submit = begun()
    assert attempted.receive(delta(submit, 0, choice=1)) == Retry("out of turn")


@pytest.mark.parametrize("reason", ["done", "cancelled"])
def test_an_end_without_the_choices_ends_is_none(reason: str) -> None:
    attempted, submit = begun()
    attempted.receive(delta(submit, 0))
    finish = Finish("r", 1, reason)  # type: ignore[arg-type]
    assert isinstance(attempted.receive(finish), Retry)


def test_lost_after_the_last_choices_end_is_no_loss() -> None:
    attempted, submit = begun()
    attempted.receive(delta(submit, 0))
    attempted.receive(delta(submit, 1, finish="stop"))
    assert attempted.receive(Lost("killed")) == Ended(Usage(7, 2))
    assert attempted.losses == 0


def test_a_drain_is_no_loss() -> None:
    attempted, _ = begun()
    assert attempted.receive(Handover("r", 1, "drain")) == Retry("drain")
    assert (attempted.losses, attempted.submit().suspect) == (0, False)


@pytest.mark.parametrize("role", ["suspect", "marked"])
def test_it_goes_on_under_a_flag_after_two_deaths_in_one_place(role: str) -> None:
    attempted, submit = begun()
    attempted.receive(delta(submit, 0))
    for attempt, flagged in [(2, False), (3, True)]:
        handover = Handover("r", submit.attempt, "metal_timeout", **{role: True})
        assert attempted.receive(handover) == Retry("metal_timeout", in_failed_pass=True)
        attempted.worker_died("metal_timeout")
        assert not attempted.record.culprit
        submit = attempted.submit()
        assert (submit.attempt, submit.suspect) == (attempt, flagged)
    attempted.receive(Handover("r", 3, "metal_timeout", suspect=True))
    attempted.worker_died("metal_timeout")
    assert attempted.record.culprit


def test_what_was_not_in_the_pass_was_not_struck() -> None:
    attempted, _ = begun()
    assert attempted.receive(Handover("r", 1, "shape", stays=True)) == Retry(
        "shape", worker_stays=True
    )


def test_only_the_reaper_knows_whether_a_silent_death_struck_it() -> None:
    attempted, _ = begun()
    lost = attempted.receive(Lost("disconnected"))
    assert isinstance(lost, Retry)
    assert lost.in_failed_pass is None
    assert attempted.submit().attempt == 2
    never_there = attempted.receive(Lost("not connected", reached=False))
    assert isinstance(never_there, Retry)
    assert never_there.in_failed_pass is False


def test_rejections() -> None:
    attempted = RequestProgress("r", GENERATION)
    attempted.submit()
    full = attempted.receive(Rejected("r", 1, "full", "busy", retry_after_s=3.0))
    assert full == Retry("full", worker_full=True, retry_after_s=3.0)
    attempted.submit()
    assert attempted.receive(Rejected("r", 2, "leaving", "bye")) == Retry("leaving")
    attempted.submit()
    with pytest.raises(InvalidRequest) as caught:
        attempted.receive(Rejected("r", 3, "invalid", "no", param="stop", code="bad"))
    error = caught.value
    assert (error.message, error.param, error.code) == ("no", "stop", "bad")


@pytest.mark.parametrize(
    ("tokens", "param", "sentence"),
    [
        (9000, "messages", "However, your messages resulted in 9000 tokens."),
        (9000, "prompt", "However, your prompt resulted in 9000 tokens."),
        (8192, "messages", "However, you requested 8193 tokens (8192 in the messages, 1 in the"),
    ],
)
def test_N25_a_context_that_is_full_is_said_as_clients_look_for_it(
    tokens: int, param: str, sentence: str
) -> None:
    attempted = RequestProgress("r", GENERATION)
    attempted.submit()
    with pytest.raises(ContextExceeded) as caught:
        attempted.receive(
            Rejected("r", 1, "invalid", "long", param, prompt_tokens=tokens, context=8192)
        )
    error = caught.value
    assert error.message.startswith("This model's maximum context length is 8192 tokens. ")
    assert sentence in error.message
    assert f"Please reduce the length of the {param}." in error.message
    assert (error.code, error.param, error.status) == ("context_length_exceeded", param, 400)
    assert error.tokens > error.context == 8192


def test_a_fault_of_its_own_names_its_kind_and_tells_no_details() -> None:
    attempted, _ = begun()
    with pytest.raises(RequestFailed) as caught:
        attempted.receive(Failed("r", 1, "metal_buffer_size", "/Users/me/secret"))
    assert caught.value.code == "metal_buffer_size"
    assert "secret" not in caught.value.message


@pytest.mark.parametrize(
    ("constraint", "param"),
    [(Constraint("regex", "a", "guided_regex"), "guided_regex"), (None, "tools")],
)
def test_a_format_that_cannot_be_followed_to_its_end_is_the_requests_fault(
    constraint: Constraint | None, param: str
) -> None:
    attempted = RequestProgress("r", replace(GENERATION, output=Output(constraint=constraint)))
    attempted.submit()
    with pytest.raises(InvalidRequest, match="too many states") as caught:
        attempted.receive(Failed("r", 1, "grammar", "it needs too many states"))
    assert (caught.value.param, caught.value.code) == (param, "format_too_complex")


def test_progress_starts_it() -> None:
    attempted, _ = begun()
    assert not attempted.started
    progress = Progress("r", 1, 10, 100)
    assert attempted.receive(progress) == progress
    assert attempted.started


def test_an_echo_is_delivered_once() -> None:
    """The echo comes with the first token: a worker that resumes after that does not send it again,
    one that resumes before does."""
    attempted = RequestProgress("r", replace(GENERATION, output=Output(echo=True)))
    attempted.submit()
    attempted.receive(Accepted("r", 1, 2))
    attempted.receive(Lost("killed"))
    submit = attempted.submit()
    assert submit.resume == ()
    attempted.receive(Accepted("r", 2, 2))
    first = delta(submit, 0, text="Once upon a")
    assert attempted.receive(first) == first
    attempted.receive(Lost("killed"))
    assert attempted.submit().resume == ((100,),)


def test_an_echo_alone_ends_its_choice() -> None:
    attempted = RequestProgress("r", replace(GENERATION, output=Output(echo=True)))
    submit = attempted.submit()
    attempted.receive(Accepted("r", 1, 2))
    alone = delta(submit, 0, ids=(), text="Once upon", finish="length")
    assert attempted.receive(alone) == alone
    assert attempted.receive(Lost("killed")) == Ended(Usage(2, 0))


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_whatever_becomes_of_the_workers_each_id_passes_once(data: st.DataObject) -> None:
    """Workers that generate the same ids and are lost at any message, n choices of any length,
    steps of any size."""
    n = data.draw(st.integers(1, 3))
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=n, max_size=n))
    attempted = RequestProgress("r", replace(GENERATION, n=n))
    delivered: list[list[int]] = [[] for _ in range(n)]
    ends = [0] * n
    for _ in range(200):
        submit = attempted.submit()
        attempted.receive(Accepted("r", submit.attempt, 7))
        at = [len(ids) for ids in submit.resume] or [0] * n
        assert at == [len(ids) for ids in delivered]
        open_choices = [i for i in range(n) if i not in submit.finished]
        while open_choices and not data.draw(st.sampled_from([False, False, False, True])):
            choice = data.draw(st.sampled_from(open_choices))
            size = min(data.draw(st.integers(1, 3)), lengths[choice] - at[choice])
            ids = tuple(range(at[choice], at[choice] + size))
            ended = at[choice] + size == lengths[choice]
            outcome = attempted.receive(
                Delta(
                    *("r", submit.attempt, choice, at[choice]),
                    ids=ids,
                    finish="stop" if ended else None,
                )
            )
            assert isinstance(outcome, Delta)
            delivered[choice] += outcome.ids
            ends[choice] += outcome.finish is not None
            at[choice] += size
            if ended:
                open_choices.remove(choice)
        if isinstance(outcome := attempted.receive(Lost("killed")), Ended):
            break
    else:
        return  # unlucky workers
    assert delivered == [list(range(length)) for length in lengths]
    assert ends == [1] * n
    assert outcome.usage == Usage(7, sum(lengths))
