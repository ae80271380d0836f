"""Stop strings, against a plain search of the whole text."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from mayfly_worker.text.stops import StopMatcher

stops = st.lists(st.text("ab<", min_size=1, max_size=5), min_size=1, max_size=4)
chunks = st.lists(st.text("ab<c", max_size=4), max_size=30)


def expected(text: str, strings: list[str], *, include: bool = False) -> tuple[str, bool]:
    """The text up to the stop that is completed first, the longest if several are."""
    found = [(text.find(s) + len(s), -len(s)) for s in strings if s in text]
    if not found:
        return text, False
    end, length = min(found)
    return text[: end if include else end + length], True


def run(strings: list[str], pieces: list[str], *, include: bool = False) -> tuple[str, bool]:
    matcher = StopMatcher(strings, include_stop=include)
    text = ""
    for piece in pieces:
        safe, stopped = matcher.feed(piece)
        text += safe
        if stopped:
            return text, True
    return text + matcher.flush(), False


@settings(deadline=None)
@given(stops, chunks, st.booleans())
def test_R29_text_ends_at_the_first_stop_however_it_is_cut(
    strings: list[str], pieces: list[str], include: bool
) -> None:
    assert run(strings, pieces, include=include) == expected(
        "".join(pieces), strings, include=include
    )


@settings(deadline=None)
@given(stops, chunks)
def test_no_more_is_held_back_than_could_become_a_stop(
    strings: list[str], pieces: list[str]
) -> None:
    matcher = StopMatcher(strings)
    text = out = ""
    for piece in pieces:
        safe, stopped = matcher.feed(piece)
        if stopped:
            return
        text, out = text + piece, out + safe
        held = text[len(out) :]
        longest = max(
            (n for s in strings for n in range(len(s)) if text.endswith(s[:n])), default=0
        )
        assert len(held) == longest


def test_of_a_stop_and_its_prefix_the_prefix_comes_first() -> None:
    assert run(["abc", "ab"], ["xa", "bc"]) == ("x", True)


def test_of_stops_completed_together_the_longest_is_cut() -> None:
    assert run(["b", "aab"], ["xaa", "b"]) == ("x", True)


def test_a_stop_inside_another_is_completed_first() -> None:
    assert run(["abcd", "bc"], ["xab", "cd"]) == ("xa", True)


def test_the_stop_that_ended_a_text_is_known() -> None:
    matcher = StopMatcher(["abc", "ab", "zz"])
    assert matcher.feed("xz") == ("x", False)
    assert matcher.matched is None
    assert matcher.feed("ab") == ("z", True)
    assert matcher.matched == "ab"


def test_a_stop_is_passed_over_while_unarmed() -> None:
    matcher = StopMatcher(["ab"])
    first, stopped = matcher.feed("xaby", armed=False)
    assert not stopped
    second, stopped = matcher.feed("zab!")
    assert (first + second, stopped) == ("xabyz", True)


def test_a_stop_that_began_unarmed_counts_where_it_ends() -> None:
    matcher = StopMatcher(["abc"])
    first, _ = matcher.feed("xab", armed=False)
    second, stopped = matcher.feed("c")
    assert (first + second, stopped) == ("x", True)


def test_empty_stops_match_nothing() -> None:
    assert run(["", "z"], ["abc", "zd"]) == ("abc", True)
    assert run([""], ["abc"]) == ("abc", False)


def test_a_long_run_of_a_stops_beginning_flows_on() -> None:
    matcher = StopMatcher(["aab"])
    assert [matcher.feed("a")[0] for _ in range(6)] == ["", "", "a", "a", "a", "a"]
