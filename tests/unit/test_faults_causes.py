"""The first exception is the truth: nothing raised later may stand in its place."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mayfly_protocol.faults import causes, chain
from mayfly_protocol.faults.classify import MAX_LATER, MAX_TEXT, MAX_TRACEBACK


def caught(raising: object) -> BaseException:
    try:
        raising()  # type: ignore[operator]
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def fail_then_fail_to_clean_up() -> None:
    try:
        raise RuntimeError("the cause")
    except RuntimeError:
        raise ValueError("the cleanup")  # noqa: B904  (that is the point)


def texts(error: BaseException) -> list[str]:
    first, later = causes(error)
    return [first.text, *(each.text for each in later)]


def test_a_single_exception() -> None:
    first, later = causes(RuntimeError("alone"))
    assert (first.type, first.text, later) == ("RuntimeError", "alone", ())


def test_cleanup_comes_later() -> None:
    first, later = causes(caught(fail_then_fail_to_clean_up))
    assert (first.type, first.text) == ("RuntimeError", "the cause")
    assert [(each.type, each.text) for each in later] == [("ValueError", "the cleanup")]


def test_each_traceback_is_its_own() -> None:
    first, later = causes(caught(fail_then_fail_to_clean_up))
    assert first.traceback.startswith("Traceback (most recent call last):")
    assert 'raise RuntimeError("the cause")' in first.traceback
    assert first.traceback.rstrip().endswith("RuntimeError: the cause")
    assert "the cleanup" not in first.traceback
    assert "RuntimeError: the cause" not in later[0].traceback


def test_an_explicit_cause_goes_before_what_was_being_handled() -> None:
    def raising() -> None:
        kept = RuntimeError("kept")
        try:
            raise OSError("handled")
        except OSError:
            raise ValueError("raised") from kept

    assert texts(caught(raising)) == ["kept", "handled", "raised"]


def test_a_suppressed_context_is_kept() -> None:
    def raising() -> None:
        try:
            raise RuntimeError("the cause")
        except RuntimeError:
            raise ValueError("the cleanup") from None

    assert texts(caught(raising)) == ["the cause", "the cleanup"]


def test_a_suppressed_context_that_says_nothing_is_no_cause() -> None:
    def raising() -> None:
        try:
            next(iter(()))
        except StopIteration:
            raise LookupError("there is none") from None

    assert texts(caught(raising)) == ["there is none"]


@pytest.mark.parametrize("error", [AssertionError(), StopIteration(), TimeoutError(), KeyError()])
def test_an_exception_without_a_message_is_known_by_its_type(error: Exception) -> None:
    assert texts(error) == [type(error).__name__]


def test_members_of_groups_come_before_their_group_and_their_causes_before_them() -> None:
    inner = ValueError("inner")
    inner.__context__ = KeyError("before inner")
    nested = ExceptionGroup("nested", [inner])
    group = BaseExceptionGroup("group", [RuntimeError("one"), nested])
    group.__context__ = OSError("before all")
    assert texts(group) == [
        "before all",
        "one",
        "'before inner'",
        "inner",
        "nested (1 sub-exception)",
        "group (2 sub-exceptions)",
    ]


def test_a_cycle_ends() -> None:
    one, two = RuntimeError("one"), RuntimeError("two")
    one.__context__, two.__cause__ = two, one
    assert texts(one) == ["two", "one"]


def test_a_long_chain_keeps_its_first_and_its_last() -> None:
    error: BaseException = RuntimeError("0")
    for n in range(1, 5000):
        following = RuntimeError(str(n))
        following.__context__ = error
        error = following
    first, later = causes(error)
    assert first.text == "0"
    assert [each.text for each in later] == [str(n) for n in range(5000 - MAX_LATER, 5000)]


def test_long_texts_are_shortened_and_the_innermost_frames_kept() -> None:
    def deep(n: int) -> None:
        if n:
            deep_too(n - 1)
        raise RuntimeError("x" * 100_000 + " the end")

    def deep_too(n: int) -> None:
        deep(n)

    first, _ = causes(caught(lambda: deep(300)))
    assert len(first.text) == MAX_TEXT
    assert len(first.traceback) == MAX_TRACEBACK
    assert first.traceback.startswith("Traceback")
    assert first.traceback.endswith(" the end\n")


def test_a_broken_exception_is_reported_all_the_same() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise ZeroDivisionError

    first, _ = causes(Broken())
    assert first.type.endswith("Broken")
    assert "ZeroDivisionError" in first.text


def test_a_type_is_named_with_its_module() -> None:
    assert causes(json.JSONDecodeError("bad", "{", 1))[0].type == "json.decoder.JSONDecodeError"


@st.composite
def tangled(draw: st.DrawFn) -> list[BaseException]:
    """Exceptions that hold on to each other in any way, cycles included."""
    errors: list[BaseException] = []
    for n in range(draw(st.integers(1, 8))):
        members = draw(st.lists(st.sampled_from(errors), max_size=3)) if errors else []
        errors.append(BaseExceptionGroup(str(n), members) if members else RuntimeError(str(n)))
    for error in errors:
        error.__context__ = draw(st.none() | st.sampled_from(errors))
        error.__cause__ = draw(st.none() | st.sampled_from(errors))
    return errors


@given(tangled())
def test_a_chain_holds_each_once_and_ends_with_what_was_caught(errors: list[BaseException]) -> None:
    error = errors[-1]
    ordered = chain(error)
    assert ordered[-1] is error
    assert len({id(each) for each in ordered}) == len(ordered)
    for each in ordered:
        assert each.__cause__ is None or each.__cause__ in ordered
        assert each.__context__ is None or each.__context__ in ordered


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), GeneratorExit()])
def test_what_is_no_error_has_a_cause_too(error: BaseException) -> None:
    assert causes(error)[0].type == type(error).__name__


def test_a_place_in_a_text_is_no_cause() -> None:
    """As json.loads raises it, with the place in the context."""
    with pytest.raises(ValueError) as caught:
        json.loads("version https")
    first, later = causes(caught.value)
    assert "line 1 column 1" in first.text
    assert later == ()
