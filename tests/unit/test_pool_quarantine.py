"""Requests that a front end refuses because workers died of them, and how it recognises them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mayfly_protocol.requests import ChatPrompt, Ending, Generation, Output, Sampling, TextPrompt
from mayfly_protocol.roster import Quarantine, Quarantined, Roster
from mayfly_server.dispatch.quarantine import QuarantineView, fingerprint

GENERATION = Generation("m", TextPrompt("p"), Sampling(seed=1))
ROSTER = Roster("node", "a", 1, 1, ())


def listing(*names: str, epoch: str = "a", left_s: float = 60.0) -> Roster:
    entries = tuple(Quarantined(name, "crashed", left_s) for name in names)
    return replace(ROSTER, epoch=epoch, quarantined=entries)


@pytest.mark.parametrize(
    "other",
    [
        replace(GENERATION, prompt=TextPrompt("q")),
        replace(GENERATION, prompt=ChatPrompt(({"role": "user", "content": "p"},))),
        replace(GENERATION, sampling=Sampling(seed=1, temperature=0.5)),
        replace(GENERATION, ending=Ending(max_tokens=3)),
        replace(GENERATION, output=Output(logprobs=1)),
        replace(GENERATION, n=2),
    ],
)
def test_a_request_is_another_if_it_computes_something_else(other: Generation) -> None:
    assert fingerprint(other, "digest", "") != fingerprint(GENERATION, "digest", "")


def test_it_is_the_same_with_another_seed_or_under_another_name() -> None:
    same = replace(GENERATION, model="alias", sampling=Sampling(seed=2))
    assert fingerprint(same, "digest", "") == fingerprint(GENERATION, "digest", "")


def test_it_is_another_with_another_model_or_of_somebody_else() -> None:
    known = fingerprint(GENERATION, "digest", "")
    assert fingerprint(GENERATION, "other", "") != known
    assert fingerprint(GENERATION, "digest", "somebody") != known


def test_what_was_condemned_here_is_refused_before_any_roster_says_so() -> None:
    view = QuarantineView()
    assert view.empty
    view.add("x", "crashed", now=100.0)
    assert not view.empty
    assert view.kind("x", 101.0) == "crashed"
    assert view.kind("y", 101.0) is None
    assert view.kind("x", 1000.0) is None, "no reaper ever took it up"


def test_rosters_say_what_is_refused_and_for_how_long() -> None:
    view = QuarantineView()
    view.update("one", listing("x", left_s=10.0), now=100.0)
    view.update("two", listing("x", "y", left_s=5.0), now=100.0)
    assert {entry.fingerprint: entry.left_s for entry in view.entries(102.0)} == {
        "x": 8.0,
        "y": 3.0,
    }
    assert view.kind("y", 104.9) == "crashed"
    assert view.kind("y", 105.1) is None
    assert view.kind("x", 109.0) == "crashed"


def test_released_means_released_here_too() -> None:
    view = QuarantineView()
    view.add("x", "crashed", now=100.0)
    view.update("one", listing("x"), now=100.5)
    view.update("one", listing(), now=101.0)
    assert view.kind("x", 101.0) is None
    assert view.empty


def test_a_new_reaper_is_told_what_the_old_one_knew() -> None:
    view = QuarantineView()
    assert view.update("one", listing("x", left_s=10.0), now=100.0) == []
    assert view.update("one", listing("x", left_s=9.0), now=101.0) == []
    told = view.update("one", listing(epoch="b"), now=104.0)
    assert told == [Quarantine("x", "crashed", 6.0)]


def test_what_is_over_leaves_nothing() -> None:
    """Or each request would be hashed for ever, to be looked up among nothing."""
    view = QuarantineView()
    view.add("never taken up", "crashed", now=100.0)
    view.update("one", listing(), now=200.0)
    assert view.empty
    view.update("two", listing("x"), now=200.0)
    view.forget("two")
    assert view.empty and view.kind("x", 200.0) is None
