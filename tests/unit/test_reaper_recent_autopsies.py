"""The last autopsies in short, as they are in rosters."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from mayfly_protocol.codec import encode, rosters
from mayfly_protocol.lifecycle import Cause, Fault
from mayfly_reaper.crash_log import (
    MAX_CAUSE_CHARACTERS,
    RECENT_AUTOPSIES,
    append_record,
    autopsy_record,
    recent_autopsies,
    short_autopsy,
)
from mayfly_reaper.publish.roster import RosterPublisher
from mayfly_reaper.rules.actions import RecordLoss
from mayfly_reaper.rules.events import MessageReceived, ProcessExited, ProcessStarted, SpawnAllowed
from mayfly_reaper.rules.slot import SlotRules
from mayfly_reaper.settings import Budgets

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def lost() -> RecordLoss:
    """Returns the record of a worker that reported a fault and exited."""
    rules = SlotRules(Budgets(), lambda: 0.0, itertools.count(7).__next__)
    slot, _ = rules.step(rules.begin("s", 0.0), SpawnAllowed(), 0.0)
    slot, _ = rules.step(slot, ProcessStarted(7, 4711), 0.0)
    cause = Cause("RuntimeError", "it hangs\nsecond line " + "x" * 2000)
    slot, _ = rules.step(slot, MessageReceived(7, Fault("metal_hang", "worker", cause)), 3.0)
    _, actions = rules.step(slot, ProcessExited(7, 70, ""), 5.0)
    [record] = [action for action in actions if isinstance(action, RecordLoss)]
    return record


def written(ago_s: float = 0.0, epoch: str = "e") -> dict[str, object]:
    time = NOW - timedelta(seconds=ago_s)
    return autopsy_record(lost(), slot="s", model="m", epoch=epoch, time=time, now=5.0)


def test_a_brief_says_who_was_lost_and_of_what() -> None:
    told = short_autopsy(written())
    assert (told.id, told.slot, told.model) == ("e-7", "s", "m")
    assert (told.incarnation, told.pid, told.lived_s) == (7, 4711, 5.0)
    assert (told.kind, told.scope, told.first_cause) == ("metal_hang", "worker", "it hangs")
    assert told.done


def test_a_cause_of_one_endless_line_is_cut() -> None:
    record = written()
    record["first_cause"] = {"text": "y" * 5000}
    assert len(short_autopsy(record).first_cause) == MAX_CAUSE_CHARACTERS


def test_the_last_ones_are_read_again_with_their_ages(tmp_path: Path) -> None:
    path = tmp_path / "autopsies.jsonl"
    assert list(recent_autopsies(path, NOW)) == []
    for number in range(RECENT_AUTOPSIES + 3):
        append_record(path, written(ago_s=100.0 - number, epoch=str(number)))
    found = list(recent_autopsies(path, NOW))
    assert [each.id for each in found] == [
        f"{number}-7" for number in range(3, RECENT_AUTOPSIES + 3)
    ]
    assert [each.age_s for each in found] == [
        100.0 - number for number in range(3, RECENT_AUTOPSIES + 3)
    ]


def test_records_of_another_version_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "autopsies.jsonl"
    append_record(path, written())
    for strange in (
        {},
        {"time": "yesterday"},
        {"time": NOW.isoformat(), "first_cause": "text"},
        {**written(), "inferences": None},
        {**written(), "slot": {"name": "s"}},
    ):
        with path.open("a") as file:
            file.write(json.dumps(strange) + "\n")
    assert [each.id for each in recent_autopsies(path, NOW)] == ["e-7"]


def test_a_roster_tells_the_last_ones_for_as_long_as_the_node_lives() -> None:
    publisher = RosterPublisher("n", "e", 1, now=0.0)
    publisher.next_roster(0.0)
    publisher.add_autopsy(short_autopsy(written(), age_s=50.0), 1.0)
    assert publisher.due == 1.0
    roster = publisher.next_roster(1000.0)
    assert [each.age_s for each in roster.autopsies] == [1049.0]
    assert rosters.decode(encode(roster)) == roster
    for number in range(RECENT_AUTOPSIES):
        publisher.add_autopsy(replace(short_autopsy(written()), id=str(number)), 2000.0)
    assert [each.id for each in publisher.next_roster(2000.0).autopsies] == list(
        map(str, range(RECENT_AUTOPSIES))
    )
