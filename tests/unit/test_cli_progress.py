"""An operator's view of a starting node, from recorded events."""

from __future__ import annotations

import io
import json
import shlex
from dataclasses import replace

import pytest
from rich.console import Console

from mayfly_cli.progress import Bars, PlainLines, Reporter, curl_command, server_address, slot_text
from mayfly_protocol.lifecycle import ModelCard
from mayfly_protocol.roster import SlotView
from support.fake_clock import FakeClock


def view(state: str, **fields: object) -> SlotView:
    given: dict[str, object] = {"slot": "smol-0", "model": "smol", "incarnation": 1, **fields}
    return SlotView(state=state, **given)  # type: ignore[arg-type]


def start(reporter: Reporter) -> None:
    """Sends the events of a first start with a download."""
    reporter.fetching("download", 0, 98_000_000)
    reporter.fetching("download", 49_000_000, 98_000_000)
    reporter.fetching("convert", 0, 0)
    reporter.fetched("smol")
    reporter.slot_changed(view("spawning"))
    reporter.slot_changed(view("loading", phase="starting"))
    for done in (0, 300_000_000, 600_000_000):
        reporter.slot_changed(
            view("loading", phase="warming", load_done=done, load_total=600_000_000)
        )
    reporter.slot_changed(view("loading", phase="loading", load_total=600_000_000))
    reporter.slot_changed(view("canary"))
    reporter.front_end_ready("127.0.0.1", 8000)
    reporter.slot_changed(view("ready", pid=4711))


def test_plain_lines_tell_each_phase_once_and_end_with_the_address() -> None:
    lines: list[str] = []
    start(Reporter(PlainLines(lines.append, FakeClock(100.0))))
    *phases, serving, curl = lines
    assert phases == [
        "model: downloading the model (0 of 98 MB)",
        "model: converting the model",
        "model: smol",
        "smol-0: starting",
        "smol-0: reading the weights into the page cache (0 of 600 MB)",
        "smol-0: loading the weights (0 of 600 MB)",
        "smol-0: trying it out",
        "smol-0: ready (incarnation 1, pid 4711)",
    ]
    assert serving.strip() == "Serving smol on http://127.0.0.1:8000"
    assert curl.startswith("curl http://127.0.0.1:8000/v1/chat/completions")


def test_plain_lines_are_rare_while_an_activity_goes_on() -> None:
    lines: list[str] = []
    clock = FakeClock(100.0)
    plain = PlainLines(lines.append, clock, soonest_s=3.0, latest_s=30.0)
    for tick in range(1, 1001):  # 0.1 s and 0.1 % a tick
        clock.now += 0.1
        plain.step("model", "downloading", tick, 1000)
    assert 8 <= len(lines) <= 11

    lines.clear()
    for tick in range(1, 1001):  # a second and 0.01 % a tick: time makes the lines, not tenths
        clock.now += 1.0
        plain.step("model", "downloading slowly", tick, 10_000)
    assert 30 <= len(lines) <= 36


def test_fast_progress_does_not_flood_a_log() -> None:
    lines: list[str] = []
    plain = PlainLines(lines.append, FakeClock(100.0))
    for done in range(0, 101, 10):
        plain.step("model", "downloading", done, 100)
    assert len(lines) == 1


def test_the_address_waits_for_a_worker_and_the_front_end_and_is_told_once() -> None:
    lines: list[str] = []
    reporter = Reporter(PlainLines(lines.append, FakeClock(100.0)))
    reporter.slot_changed(view("ready"))
    assert not any("Serving" in line for line in lines)
    reporter.front_end_ready("127.0.0.1", 8000)
    reporter.slot_changed(view("ready", incarnation=2))
    reporter.front_end_ready("127.0.0.1", 8000)
    assert sum("Serving" in line for line in lines) == 1


def test_M09_what_a_model_can_do_is_said_once_and_again_if_it_changed() -> None:
    lines: list[str] = []
    reporter = Reporter(PlainLines(lines.append, FakeClock(100.0)))
    card = ModelCard(
        digest="d", rows=1, one_row_because="mlx-lm cannot batch its caches", chat=False
    )
    for incarnation in (1, 2):
        reporter.slot_changed(view("ready", incarnation=incarnation, card=card))
    reporter.slot_changed(view("ready", incarnation=3, card=replace(card, context=4096)))
    said = [line for line in lines if line.startswith("smol: ")]
    alone = "sequences one at a time: mlx-lm cannot batch its caches"
    assert said == [
        f"smol: context no limit; {alone}; chat no chat template: completions only",
        f"smol: context 4,096 tokens; {alone}; chat no chat template: completions only",
    ]


def test_a_replacement_is_told_and_repeats_are_not() -> None:
    lines: list[str] = []
    reporter = Reporter(PlainLines(lines.append, FakeClock(100.0)))
    reporter.slot_changed(view("ready", pid=1))
    reporter.slot_changed(view("ready", pid=1))
    reporter.note("smol-0: lost worker 1 (pid 1): killed by SIGKILL")
    reporter.slot_changed(view("gone", detail="killed by SIGKILL"))
    reporter.slot_changed(view("backoff", detail="killed by SIGKILL", retry_in_s=2.2))
    reporter.slot_changed(view("backoff", detail="killed by SIGKILL", retry_in_s=1.2))
    reporter.slot_changed(view("spawning", incarnation=2))
    reporter.slot_changed(view("ready", incarnation=2, pid=2))
    assert lines == [
        "smol-0: ready (incarnation 1, pid 1)",
        "smol-0: lost worker 1 (pid 1): killed by SIGKILL",
        "smol-0: waits 2 s before it tries again",
        "smol-0: starting",
        "smol-0: ready (incarnation 2, pid 2)",
    ]


def test_a_failure_keeps_its_reason() -> None:
    assert slot_text(view("failed", detail="no such folder")) == "failed: no such folder"


def test_a_reason_is_told_once_for_each_slot() -> None:
    lines: list[str] = []
    reporter = Reporter(PlainLines(lines.append, FakeClock(100.0)))
    reporter.note("smol-0: lost worker 1 (pid 1): no such folder; nothing")
    reporter.slot_changed(view("failed", detail="no such folder"))
    reporter.note("smol-1: lost worker 2 (pid 2): no memory; a new worker starts in 1 s")
    reporter.slot_changed(view("backoff", slot="smol-1", detail="no such folder"))
    assert lines[1] == "smol-0: failed"
    assert lines[3] == "smol-1: waits before it tries again: no such folder"


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("mac.local", "http://mac.local:80"),
    ],
)
def test_the_address_can_be_reached(host: str, expected: str) -> None:
    assert server_address(host, 80) == expected


def test_the_curl_line_survives_a_shell() -> None:
    words = shlex.split(curl_command("http://h:1", "it's", "What's up?").replace("\\\n", ""))
    assert words[:2] == ["curl", "http://h:1/v1/chat/completions"]
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == "it's"
    assert body["messages"] == [{"role": "user", "content": "What's up?"}]


def test_the_curl_line_has_a_place_for_the_key_if_one_is_needed() -> None:
    lines: list[str] = []
    reporter = Reporter(PlainLines(lines.append, FakeClock(100.0)), needs_key=True)
    reporter.front_end_ready("127.0.0.1", 8000)
    reporter.slot_changed(view("ready"))
    words = shlex.split(lines[-1].replace("\\\n", ""))
    assert "Authorization: Bearer $MAYFLY_API_KEY" in words


def bars() -> tuple[Bars, Console, io.StringIO]:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=120, color_system=None)
    return Bars(console), console, shown


def test_bars_show_sizes_and_leave_only_lines_behind() -> None:
    renderer, console, shown = bars()
    start(Reporter(renderer))
    text = shown.getvalue()
    assert "Serving smol on http://127.0.0.1:8000" in text
    assert "smol-0: ready (incarnation 1, pid 4711)" in text
    # Nothing is under way any more, so nothing may redraw over what a log writes now.
    assert console._live_stack == []
    assert text.rstrip().endswith("'")


def test_bars_draw_the_current_activity_of_each_worker() -> None:
    renderer, console, shown = bars()
    renderer.step("smol-0", "loading the weights", 300_000_000, 600_000_000)
    renderer.step("smol-1", "starting", 0, 0)
    renderer.step("smol-1", "trying [bold]it[/bold] out", 0, 0)
    (live,) = console._live_stack
    live.refresh()
    text = shown.getvalue()
    assert "smol-0: loading the weights" in text
    assert "300 of 600 MB" in text
    assert "smol-1: trying [bold]it[/bold] out" in text
    renderer.over("smol-0")
    assert console._live_stack != []
    renderer.over("smol-1")
    assert console._live_stack == []


def test_closing_bars_in_the_middle_gives_the_cursor_back() -> None:
    renderer, console, shown = bars()
    renderer.step("model", "downloading", 1, 2)
    renderer.close()
    renderer.over("model")
    assert console._live_stack == []
    hide, show = "\x1b[?25l", "\x1b[?25h"
    assert shown.getvalue().rindex(show) > shown.getvalue().rindex(hide)
