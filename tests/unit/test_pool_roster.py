"""A front end's knowledge of nodes and their workers, from rosters."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mayfly_protocol.roster import Loss, Roster, SlotView
from mayfly_server.dispatch.availability import availability
from mayfly_server.dispatch.rosters import Incarnation, Rosters, Slot

VIEW = SlotView("s", "m", "ready", 3)
ROSTER = Roster("node", "a", 5, 1, (VIEW,))
WORKER = Incarnation("node", "a", "s", 3)


def rosters_of(*rosters: Roster) -> Rosters:
    known = Rosters(silence_s=5.0)
    for roster in rosters:
        known.update("ipc://x", roster, now=100.0)
    return known


def slot(view: SlotView, silent: bool = False) -> Slot:
    return Slot("where", "node", "a", view, 0.0, silent)


def test_nothing_heard() -> None:
    assert not rosters_of()
    assert list(rosters_of().slots(0.0)) == []
    assert not rosters_of().is_gone(WORKER)


def test_an_older_roster_changes_nothing() -> None:
    known = rosters_of(ROSTER)
    assert not known.update("ipc://x", replace(ROSTER, revision=4, slots=()), 101.0)
    assert [found.incarnation for found in known.slots(101.0)] == [WORKER]
    assert known.update("ipc://x", ROSTER, 101.0), "the same again is a sign of life"


def test_a_new_reaper_begins_to_count_anew() -> None:
    known = rosters_of(ROSTER)
    assert known.update("ipc://x", Roster("node", "b", 1, 2, ()), 101.0)
    assert list(known.slots(101.0)) == []


def test_a_silent_node_keeps_its_workers() -> None:
    known = rosters_of(ROSTER)
    assert [found.silent for found in known.slots(104.9)] == [False]
    assert [found.silent for found in known.slots(105.1)] == [True]
    assert not known.is_gone(WORKER)


@pytest.mark.parametrize(
    ("view", "gone"),
    [
        (VIEW, False),
        (replace(VIEW, state="draining"), False),
        (replace(VIEW, state="gone"), True),
        (replace(VIEW, state="backoff"), True),
        (replace(VIEW, state="loading", incarnation=4), True),
        (replace(VIEW, slot="other"), True),
    ],
)
def test_its_own_reaper_says_when_a_worker_is_gone(view: SlotView, gone: bool) -> None:
    assert rosters_of(replace(ROSTER, slots=(view,))).is_gone(WORKER) is gone


def test_a_new_reaper_does_not_speak_for_the_old_ones_workers() -> None:
    assert not rosters_of(Roster("node", "b", 1, 2, ())).is_gone(WORKER)


def test_the_verdict_on_a_lost_worker() -> None:
    loss = Loss("s", 3, "crashed", "worker", "SIGSEGV", 3.0, suspects=("r1", "r2"))
    before = Loss("s", 2, "wedged", "worker", "still", 9.0)
    known = rosters_of(replace(ROSTER, losses=(before, loss)))
    assert known.loss(WORKER) == loss
    assert known.loss(replace(WORKER, slot="other")) is None
    assert known.loss(replace(WORKER, epoch="older")) is None


def test_a_worker_is_watched_while_its_own_reaper_is_heard() -> None:
    assert rosters_of(ROSTER).is_watched(WORKER, 100.0)
    assert not rosters_of(ROSTER).is_watched(WORKER, 1000.0)
    assert not rosters_of(replace(ROSTER, epoch="newer")).is_watched(WORKER, 100.0)


def test_a_new_reaper_voids_the_ones_before_it() -> None:
    """An old roster may also arrive after a new one, over the other of two connections."""
    known = rosters_of(ROSTER, replace(ROSTER, epoch="b", revision=1, slots=()))
    assert not known.update("ipc://x", replace(ROSTER, revision=99), 101.0)
    assert list(known.slots(101.0)) == []
    assert known.update("ipc://x", replace(ROSTER, epoch="c", revision=0), 102.0)
    for void in ("a", "b"):
        assert not known.update("ipc://x", replace(ROSTER, epoch=void, revision=100), 103.0)
    assert known.update("ipc://another", ROSTER, 103.0), "at another address it is nobody's past"


def test_a_node_that_is_given_up_is_forgotten() -> None:
    known = rosters_of(ROSTER)
    known.forget("ipc://x")
    assert not known
    known.forget("ipc://x")


@pytest.mark.parametrize(
    ("view", "coming", "retry_after_s"),
    [
        (replace(VIEW, state="spawning"), True, 5.0),
        (replace(VIEW, state="loading", load_done=1, load_total=4, age_s=2.0), True, 6.0),
        (replace(VIEW, state="loading", load_done=1, load_total=10**9, age_s=9.0), True, 600.0),
        (replace(VIEW, state="canary"), True, 5.0),
        (VIEW, True, 1.0),
        (replace(VIEW, state="backoff", retry_in_s=20.0), True, 25.0),
        (replace(VIEW, state="failed"), False, 5.0),
    ],
)
def test_outlook_of_one_slot(view: SlotView, coming: bool, retry_after_s: float) -> None:
    found = availability([slot(view)])
    assert (found.coming, found.retry_after_s) == (coming, retry_after_s)
    assert found.failed is not coming


def test_outlook_is_that_of_the_most_hopeful_slot() -> None:
    failed, waiting = replace(VIEW, state="failed"), replace(VIEW, state="backoff", retry_in_s=99.0)
    assert availability([slot(failed), slot(waiting)]).pause_s == 99.0
    loading = replace(VIEW, state="loading", load_done=50, load_total=100, age_s=1.0)
    found = availability([slot(failed), slot(waiting), slot(loading)])
    assert (found.pause_s, found.reason) == (0.0, "it is being loaded (50 %)")


def test_outlook_where_nobody_knows() -> None:
    for found in (availability([]), availability([slot(VIEW, silent=True)])):
        assert (found.coming, found.failed) == (False, False)
