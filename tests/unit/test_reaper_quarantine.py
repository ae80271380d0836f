"""A reaper's memory of requests that workers died of."""

from __future__ import annotations

from mayfly_protocol.roster import Quarantine, Quarantined, Release
from mayfly_reaper.publish.roster import MAX_QUARANTINED, QuarantineList


def test_it_is_told_until_its_time_is_over() -> None:
    kept = QuarantineList()
    assert kept.add(Quarantine("ab", "crashed", 10.0), now=100.0).ok
    assert kept.entries(104.0) == (Quarantined("ab", "crashed", 6.0),)
    assert kept.entries(110.0) == ()


def test_the_later_end_counts() -> None:
    kept = QuarantineList()
    kept.add(Quarantine("ab", "crashed", 10.0), now=100.0)
    kept.add(Quarantine("ab", "crashed", 3.0), now=101.0)
    kept.add(Quarantine("cd", "wedged", 3.0), now=101.0)
    kept.add(Quarantine("cd", "wedged", 10.0), now=102.0)
    assert [each.left_s for each in kept.entries(103.0)] == [7.0, 9.0]


def test_release_takes_a_beginning_or_everything() -> None:
    kept = QuarantineList()
    for name in ("aa", "ab", "b"):
        kept.add(Quarantine(name, "crashed", 10.0), now=0.0)
    assert kept.release(Release("a"), 1.0).message == "released 2"
    assert [each.fingerprint for each in kept.entries(1.0)] == ["b"]
    refused = kept.release(Release("x"), 1.0)
    assert (refused.ok, "'x'" in refused.message) == (False, True)
    assert kept.release(Release(), 1.0).ok
    assert kept.entries(1.0) == ()
    assert kept.release(Release(), 1.0).ok, "nothing to release is no failure"


def test_it_does_not_grow_without_end() -> None:
    kept = QuarantineList()
    for number in range(MAX_QUARANTINED + 5):
        kept.add(Quarantine(f"{number:04}", "crashed", 10.0 + number), now=0.0)
    names = [each.fingerprint for each in kept.entries(1.0)]
    assert len(names) == MAX_QUARANTINED
    assert names[0] == "0005", "those that would have ended first"
