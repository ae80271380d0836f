"""What ``mayfly serve`` shows: the model's fetching, each worker's start, what happens later.

:class:`Reporter` hears of everything and decides what is worth a word. How it looks is up to a
:class:`Renderer`: bars where a person watches a terminal (:mod:`mayfly_cli.progress`), plain
lines elsewhere, which a log or a test can read (:class:`PlainLines`).

Progress bars, for a person at a terminal.

What ``mayfly serve`` and ``mayfly node`` show where their output is read by programs: every
event is a line of the log (``--log-format json``).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import structlog
from rich.console import Console
from rich.control import Control
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.segment import ControlType

from mayfly_protocol.common.secrets import API_KEY_VARIABLE
from mayfly_protocol.roster import SlotView
from mayfly_reaper.observer import NOBODY, About, Observer

FETCHING = {
    "download": "downloading the model",
    "convert": "converting the model",
}
LOADING = {
    "starting": "starting",
    "warming": "reading the weights into the page cache",
    "loading": "loading the weights",
    "canary": "trying it out",
}
UNDER_WAY = frozenset({"spawning", "loading", "canary"})


class Audience(Observer, Protocol):
    """Somebody who watches a node from before it starts."""

    def fetching(self, what: str, done: int, total: int) -> None:
        """The model is downloaded or converted."""

    def fetched(self, name: str) -> None:
        """The model is on this machine, and was so before if nothing was told of its fetching."""

    def close(self) -> None:
        """Nothing more comes."""


class Renderer(Protocol):
    """A place to show progress. Activities are told apart by ``who``."""

    def step(self, who: str, doing: str, done: int, total: int) -> None:
        """``who`` is ``doing`` something: ``done`` of ``total`` bytes, 0 of 0 if unmeasured."""

    def over(self, who: str) -> None:
        """``who`` does nothing any more that has progress."""

    def line(self, text: str) -> None:
        """A line that stays."""

    def close(self) -> None:
        """Nothing more comes."""


class Reporter:
    """An audience for people. ``keyed``: the server asks for API keys."""

    def __init__(
        self,
        renderer: Renderer,
        prompt: str = "What is the capital of France?",
        *,
        keyed: bool = False,
    ) -> None:
        self._renderer = renderer
        self._prompt = prompt
        self._keyed = keyed
        self._told: dict[str, tuple[str, int, str]] = {}
        self._noted = ""
        self._ready: str | None = None
        self._address: str | None = None
        self._announced = False

    def fetching(self, what: str, done: int, total: int) -> None:
        self._renderer.step("model", FETCHING.get(what, what), done, total)

    def fetched(self, name: str) -> None:
        self._renderer.over("model")
        self._renderer.line(f"model: {name}")

    def slot_changed(self, view: SlotView) -> None:
        if view.state in UNDER_WAY:
            self._told.pop(view.slot, None)
            doing = LOADING.get("canary" if view.state == "canary" else view.phase, "starting")
            self._renderer.step(view.slot, doing, view.load_done, view.load_total)
            return
        self._renderer.over(view.slot)
        if view.state == "gone":
            return  # of a loss there is a note, and of an end that was asked for no need of one
        news = (view.state, view.incarnation, view.detail)
        if self._told.get(view.slot) != news:
            self._told[view.slot] = news
            if view.detail in self._noted:
                view = replace(view, detail="")  # the line before this one has said it
            self._renderer.line(f"{view.slot}: {standing(view)}")
        if view.state == "ready":
            self._ready = view.model
            self._announce()

    def front_end_ready(self, host: str, port: int) -> None:
        self._address = address(host, port)
        self._announce()

    def note(self, text: str, about: About = NOBODY) -> None:
        self._noted = text
        self._renderer.line(text)

    def close(self) -> None:
        """Puts the terminal back as it was."""
        self._renderer.close()

    def _announce(self) -> None:
        """Once there is somebody to ask and something to answer, says how."""
        if self._announced or self._ready is None or self._address is None:
            return
        self._announced = True
        self._renderer.line(f"\nServing {self._ready} on {self._address}\n")
        curl = request(self._address, self._ready, self._prompt, keyed=self._keyed)
        self._renderer.line(f"{curl}\n")


def standing(view: SlotView) -> str:
    """How a slot that is not starting stands, in words."""
    detail = f": {view.detail}" if view.detail else ""
    match view.state:
        case "ready":
            return f"ready (incarnation {view.incarnation}, pid {view.pid})"
        case "backoff" if view.retry_in_s is not None:
            return f"waits {view.retry_in_s:.0f} s before it tries again{detail}"
        case "backoff":
            return f"waits before it tries again{detail}"
        case "draining":
            return f"finishes what it has, and takes nothing new{detail}"
        case state:
            return f"{state}{detail}"


def address(host: str, port: int) -> str:
    """Where to reach a server that listens on ``host`` from its own machine."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)  # noqa: S104
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


def request(server: str, model: str, prompt: str, *, keyed: bool = False) -> str:
    """A curl command to try a server with, ready to paste into a shell: one that has the key in
    the variable that `mayfly chat` takes it from, if one is needed."""
    messages = [{"role": "user", "content": prompt}]
    body = json.dumps({"model": model, "temperature": 0, "messages": messages})
    quoted = body.replace("'", "'\\''")
    key = f'  -H "Authorization: Bearer ${API_KEY_VARIABLE}" \\\n' if keyed else ""
    return (
        f"curl {server}/v1/chat/completions \\\n"
        f"  -H 'Content-Type: application/json' \\\n"
        f"{key}"
        f"  -d '{quoted}'"
    )


class PlainLines:
    """Lines without colours or times: one when an activity begins, and while it goes on one for
    every tenth of it, but not more often than every few seconds, nor ever much more seldom than
    that: a silent log is taken for a dead one."""

    def __init__(
        self,
        write: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        soonest_s: float = 3.0,
        latest_s: float = 30.0,
    ) -> None:
        self._write = write
        self._clock = clock
        self._soonest_s = soonest_s
        self._latest_s = latest_s
        self._last: dict[str, tuple[str, float, float]] = {}

    def step(self, who: str, doing: str, done: int, total: int) -> None:
        now = self._clock()
        share = done / total if total else 0.0
        before, told_share, told_at = self._last.get(who, ("", 0.0, 0.0))
        if doing == before:
            waited = now - told_at
            if waited < self._soonest_s or done == 0:
                return
            if share < told_share + 0.1 and waited < self._latest_s:
                return
        self._last[who] = (doing, share, now)
        size = measure(done, total)
        self._write(f"{who}: {doing} ({size})" if size else f"{who}: {doing}")

    def over(self, who: str) -> None:
        self._last.pop(who, None)

    def line(self, text: str) -> None:
        self._write(text)

    def close(self) -> None:
        self._last.clear()


def measure(done: int, total: int) -> str:
    """How far something is that is counted in bytes; empty where its size is not known."""
    return f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB" if total else ""


_OVER_ECHO = Control(ControlType.CARRIAGE_RETURN)
"""A terminal echoes Ctrl-C as ``^C``; the line that answers it is written over that."""


class Bars:
    """A :class:`mayfly_cli.progress.Renderer` that draws a bar an activity.

    The bars are drawn only while something is under way; then they are taken away, and what was
    reached stays as lines. So nothing of it redraws over a server's log.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._tasks: dict[str, tuple[str, TaskID]] = {}

    def step(self, who: str, doing: str, done: int, total: int) -> None:
        if self._progress is None:
            self._progress = _progress(self._console)
            self._progress.start()
        drawn = self._tasks.get(who)
        if drawn is not None and drawn[0] != doing:
            self._progress.remove_task(drawn[1])
            drawn = None
        if drawn is None:
            drawn = (doing, self._progress.add_task(f"{who}: {doing}", measure=""))
            self._tasks[who] = drawn
        self._progress.update(
            drawn[1], completed=done, total=total or None, measure=measure(done, total)
        )

    def over(self, who: str) -> None:
        drawn = self._tasks.pop(who, None)
        if drawn is None or self._progress is None:
            return
        self._progress.remove_task(drawn[1])
        if not self._tasks:
            self.close()

    def line(self, text: str) -> None:
        self._console.control(_OVER_ECHO)
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        self._tasks.clear()


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[measure]}", markup=False),
        TimeRemainingColumn(compact=True),
        console=console,
        transient=True,
    )


class LogLines:
    """A :class:`mayfly_cli.progress.Audience` that says no more than what changes."""

    def __init__(self) -> None:
        self._log = structlog.get_logger(__name__)
        self._fetching = ""
        self._told: dict[str, tuple[str, int, str]] = {}

    def fetching(self, what: str, done: int, total: int) -> None:
        if what != self._fetching:
            self._fetching = what
            self._log.info("the model is fetched", step=what, total_bytes=total)

    def fetched(self, name: str) -> None:
        self._fetching = ""
        self._log.info("the model is here", model=name)

    def slot_changed(self, view: SlotView) -> None:
        news = (view.state, view.incarnation, view.detail)
        if self._told.get(view.slot) == news:
            return
        self._told[view.slot] = news
        say = self._log.error if view.state == "failed" else self._log.info
        say(
            "a slot changed",
            slot=view.slot,
            incarnation=view.incarnation,
            state=view.state,
            pid=view.pid,
            detail=view.detail,
        )

    def front_end_ready(self, host: str, port: int) -> None:
        self._log.info("the front end serves", host=host, port=port)

    def note(self, text: str, about: About = NOBODY) -> None:
        say = self._log.warning if about.bad else self._log.info
        say(text, **({"slot": about.slot, "incarnation": about.incarnation} if about.slot else {}))

    def close(self) -> None:
        """There is nothing to put back."""
