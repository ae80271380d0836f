"""A node's progress as log lines, for programs instead of a terminal."""

from __future__ import annotations

from dataclasses import replace

from structlog.testing import capture_logs

from mayfly_cli.progress import LogLines
from mayfly_protocol.lifecycle import ModelCard
from mayfly_protocol.roster import SlotState, SlotView
from mayfly_reaper.observer import About


def view(state: SlotState, incarnation: int = 1, done: int = 0) -> SlotView:
    return SlotView("m-0", "m", state, incarnation, pid=7, load_done=done)


def test_a_slot_is_told_when_it_changes() -> None:
    with capture_logs() as told:
        lines = LogLines()
        for shown in (
            *(view("loading", done=done) for done in range(50)),
            view("ready"),
            view("ready"),
            view("failed", 2),
        ):
            lines.slot_changed(shown)
    assert [(t["state"], t["incarnation"], t["log_level"]) for t in told] == [
        ("loading", 1, "info"),
        ("ready", 1, "info"),
        ("failed", 2, "error"),
    ]
    assert all(t["slot"] == "m-0" for t in told)


def test_M09_what_a_model_can_do_is_a_line() -> None:
    card = ModelCard(digest="d", rows=1, one_row_because="mlx-lm cannot batch its caches")
    with capture_logs() as told:
        lines = LogLines()
        for incarnation in (1, 2):
            lines.slot_changed(replace(view("ready", incarnation), card=card))
    [line] = [each for each in told if each["event"] == "model loaded"]
    assert (line["model"], line["log_level"]) == ("m", "info")
    assert line["sequences"] == "one at a time: mlx-lm cannot batch its caches"
    assert line["tool_calls"].startswith("left in the text")


def test_a_note_says_which_worker_it_is_about() -> None:
    with capture_logs() as told:
        lines = LogLines()
        lines.note("lost worker 3", About("m-0", 3, bad=True))
        lines.note("stopping")
    bad, other = told
    assert (bad["slot"], bad["incarnation"], bad["log_level"]) == ("m-0", 3, "warning")
    assert (other["event"], other["log_level"]) == ("stopping", "info")
    assert "slot" not in other


def test_a_fetch_is_told_step_by_step() -> None:
    with capture_logs() as told:
        lines = LogLines()
        for done in range(100):
            lines.fetching("download", done, 100)
        lines.fetching("convert", 0, 0)
        lines.fetched("m")
        lines.close()
    assert [t.get("step") for t in told] == ["download", "convert", None]
    assert told[-1]["model"] == "m"
