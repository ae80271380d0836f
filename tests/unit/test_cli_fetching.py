"""The command line's side of a fetch, against scripts that print what the fetcher prints."""

from __future__ import annotations

import os
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from mayfly_cli.commands.fetching import Fetched, FetchFailed, fetch, read_events


def script(body: str) -> list[str]:
    head = "import json, os, sys, time\ndef say(**event): print(json.dumps(event), flush=True)\n"
    return [sys.executable, "-c", head + textwrap.dedent(body)]


def ignore(what: str, done: int, total: int) -> None:
    pass


@pytest.mark.process
def test_progress_is_passed_on_and_the_end_is_returned() -> None:
    seen: list[tuple[str, int, int]] = []
    command = script(
        """
        say(event="progress", what="download", done=1, total=2)
        say(event="progress", what="convert", done=0, total=0)
        say(event="done", path="/models/smol", name="smol")
        """
    )
    fetched = fetch(command, lambda what, done, total: seen.append((what, done, total)))
    assert fetched == Fetched(Path("/models/smol"), "smol")
    assert seen == [("download", 1, 2), ("convert", 0, 0)]


@pytest.mark.process
def test_the_fetchers_own_words_are_the_error() -> None:
    with pytest.raises(FetchFailed, match=r"^no repository of that name$"):
        fetch(script("say(event='error', message='no repository of that name')"), ignore)


@pytest.mark.process
def test_a_fetcher_that_dies_leaves_its_last_words_and_its_status() -> None:
    command = script("sys.exit('no space left on device')")
    with pytest.raises(FetchFailed, match="status 1: no space left on device"):
        fetch(command, ignore)


@pytest.mark.process
def test_a_fetcher_that_is_killed_is_reported() -> None:
    with pytest.raises(FetchFailed, match="status -9: it printed nothing"):
        fetch(script("os.kill(os.getpid(), 9)"), ignore)


@pytest.mark.parametrize(
    "line",
    ["Downloading...", "[]", "3", "{}", '{"event": "done"}', '{"event": "progress", "what": "x"}'],
)
def test_what_is_no_event_is_quoted(line: str) -> None:
    with pytest.raises(FetchFailed, match="which is no event") as raised:
        read_events([line], ignore)
    assert line in str(raised.value)


def test_an_unknown_event_is_passed_over() -> None:
    lines = ['{"event": "checking"}', '{"event": "done", "path": "/m", "name": "m"}']
    assert read_events(lines, ignore) == Fetched(Path("/m"), "m")


@pytest.mark.process
@pytest.mark.parametrize("stubborn", [False, True], ids=["obedient", "deaf to SIGTERM"])
def test_an_interrupt_ends_the_child(stubborn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mayfly_cli.commands.fetching.STOP_S", 0.2)
    command = script(
        f"""
        import signal
        if {stubborn}: signal.signal(signal.SIGTERM, signal.SIG_IGN)
        say(event="progress", what="download", done=os.getpid(), total=0)
        time.sleep(60)
        """
    )
    pids: list[int] = []

    def interrupt(what: str, done: int, total: int) -> None:
        pids.append(done)
        assert os.getpgid(done) != os.getpgid(0)  # a terminal's Ctrl-C would not reach it
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(command, interrupt)
    assert not psutil.pid_exists(pids[0])
