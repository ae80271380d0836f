"""Output of ``mayfly serve`` and ``mayfly node``: models being fetched, workers starting and lost.

::

    Node --> Reporter --> Bars        if stdout is a terminal
         |           +--> PlainLines  if stdout is a file or a pipe
         +-> LogLines                 with ``--log-format json``: log lines only, for programs

:class:`Reporter` decides which events are shown, a :class:`Renderer` how they are shown.
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

from mayfly_protocol.capabilities import in_words
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

_OVER_ECHO = Control(ControlType.CARRIAGE_RETURN)
"""Output before each line, so that the line overwrites the ``^C`` that a terminal shows for
Ctrl-C."""


class StartObserver(Observer, Protocol):
    """Receives the events of a node on this machine (its workers' starts and ends), and before them
    the events of fetching the node's models."""

    def fetching(self, what: str, done: int, total: int) -> None:
        """Receives the progress of a model's download or conversion: ``done`` of ``total`` bytes, 0
        of 0 if they are not known. ``what`` is ``download`` or ``convert``."""

    def fetched(self, name: str) -> None:
        """Receives the name of a model whose files are complete on this machine. If
        :meth:`fetching` was not called before, nothing had to be fetched."""

    def close(self) -> None:
        """Ends the output, and restores the terminal."""


class Renderer(Protocol):
    """Shows activities with their progress, and lines of text. ``who`` names the subject of an
    activity: ``model`` for the fetching of a model, or the slot (place on this machine)
    of a starting worker."""

    def step(self, who: str, doing: str, done: int, total: int) -> None:
        """Shows what ``who`` (the model being fetched, or a slot whose worker starts) is doing, and
        the progress: ``done`` of ``total`` bytes, 0 of 0 if they are not known."""

    def over(self, who: str) -> None:
        """Removes the activity of ``who`` (the model being fetched, or a slot whose worker starts),
        because the activity has ended."""

    def line(self, text: str) -> None:
        """Writes a line of text that is not removed later."""

    def close(self) -> None:
        """Ends the output: removes all activities that are still shown."""


class Reporter:
    """Shows a node's events to a person: each activity, each change of a worker's state once, and a
    curl command, ready to paste, that sends ``prompt``. ``needs_key`` is True if the server
    requires API keys."""

    def __init__(
        self,
        renderer: Renderer,
        prompt: str = "What is the capital of France?",
        *,
        needs_key: bool = False,
    ) -> None:
        self._renderer = renderer
        self._prompt = prompt
        self._needs_key = needs_key
        self._shown: dict[str, tuple[str, int, str]] = {}
        self._models = _LoadedModels()
        self._last_note = ""
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
            self._shown.pop(view.slot, None)
            doing = LOADING.get("canary" if view.state == "canary" else view.phase, "starting")
            self._renderer.step(view.slot, doing, view.load_done, view.load_total)
            return
        self._renderer.over(view.slot)
        if view.state == "gone":
            return  # the loss of a worker has a note of its own; an intended end needs none
        shown = (view.state, view.incarnation, view.detail)
        if self._shown.get(view.slot) != shown:
            self._shown[view.slot] = shown
            if view.detail in self._last_note:
                view = replace(view, detail="")  # the last note contains this detail
            self._renderer.line(f"{view.slot}: {slot_text(view)}")
        if view.state == "ready":
            if words := self._models.new_words(view):
                described = "; ".join(f"{subject} {text}" for subject, text in words.items())
                self._renderer.line(f"{view.model}: {described}")
            self._ready = view.model
            self._announce()

    def front_end_ready(self, host: str, port: int) -> None:
        self._address = server_address(host, port)
        self._announce()

    def note(self, text: str, about: About = NOBODY) -> None:
        self._last_note = text
        self._renderer.line(text)

    def close(self) -> None:
        """Removes the activities that are still shown, and restores the terminal."""
        self._renderer.close()

    def _announce(self) -> None:
        """Shows the server's address and a first request, once, when a worker and the front end are
        ready."""
        if self._announced or self._ready is None or self._address is None:
            return
        self._announced = True
        self._renderer.line(f"\nServing {self._ready} on {self._address}\n")
        curl = curl_command(self._address, self._ready, self._prompt, needs_key=self._needs_key)
        self._renderer.line(f"{curl}\n")


class _LoadedModels:
    """Capabilities of each model that were shown, so that they are shown once, and again only if
    another worker's differ."""

    def __init__(self) -> None:
        self._words: dict[str, dict[str, str]] = {}

    def new_words(self, view: SlotView) -> dict[str, str]:
        """Returns the capabilities of a ready worker's model in words; none if they were shown."""
        words = in_words(view.card) if view.card is not None else {}
        if not words or self._words.get(view.model) == words:
            return {}
        self._words[view.model] = words
        return words


def slot_text(view: SlotView) -> str:
    """Describes the state of a worker for a person, unless the worker is starting."""
    detail = f": {view.detail}" if view.detail else ""
    match view.state:
        case "ready":
            return f"ready (incarnation {view.incarnation}, pid {view.pid})"
        case "backoff" if view.retry_in_s is not None:
            return f"waits {view.retry_in_s:.0f} s before it tries again{detail}"
        case "backoff":
            return f"waits before it tries again{detail}"
        case "draining":
            return f"finishes its requests, and takes no new ones{detail}"
        case state:
            return f"{state}{detail}"


def server_address(host: str, port: int) -> str:
    """Returns the URL at which a server that listens on ``host`` is reached from its own
    machine."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)  # noqa: S104
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


def curl_command(server: str, model: str, prompt: str, *, needs_key: bool = False) -> str:
    """Returns a curl command that sends ``prompt`` to a server, ready to paste into a shell. With
    ``needs_key`` it sends the API key in the environment variable that `mayfly chat` reads, too."""
    messages = [{"role": "user", "content": prompt}]
    body = json.dumps({"model": model, "temperature": 0, "messages": messages})
    quoted = body.replace("'", "'\\''")
    key = f'  -H "Authorization: Bearer ${API_KEY_VARIABLE}" \\\n' if needs_key else ""
    return (
        f"curl {server}/v1/chat/completions \\\n"
        f"  -H 'Content-Type: application/json' \\\n"
        f"{key}"
        f"  -d '{quoted}'"
    )


class PlainLines:
    """A :class:`Renderer` that writes plain lines. An activity has a line when it begins, and one
    for every tenth of its bytes, but at most every ``soonest_s`` seconds. An activity without a
    line for ``latest_s`` seconds gets a line, too, if its progress is known, so that the process
    does not seem to hang."""

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
        before, last_share, last_at = self._last.get(who, ("", 0.0, 0.0))
        if doing == before:
            waited = now - last_at
            if waited < self._soonest_s or done == 0:
                return
            if share < last_share + 0.1 and waited < self._latest_s:
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
    """Describes how many of an activity's ``total`` bytes are done, in megabytes; the text is empty
    if the total is not known (0)."""
    return f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB" if total else ""


class Bars:
    """A :class:`Renderer` that draws a progress bar for each activity in a terminal.

    All bars are removed when the last activity ends, so that no bar is drawn over the log lines
    that the server writes later.
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
    """A :class:`StartObserver` that writes a log line for each event: models being fetched, changes
    of workers' states, losses."""

    def __init__(self) -> None:
        self._log = structlog.get_logger(__name__)
        self._fetching = ""
        self._shown: dict[str, tuple[str, int, str]] = {}
        self._models = _LoadedModels()

    def fetching(self, what: str, done: int, total: int) -> None:
        if what != self._fetching:
            self._fetching = what
            self._log.info("fetching the files of a model", step=what, total_bytes=total)

    def fetched(self, name: str) -> None:
        self._fetching = ""
        self._log.info("model fetched: its workers can load it", model=name)

    def slot_changed(self, view: SlotView) -> None:
        shown = (view.state, view.incarnation, view.detail)
        if self._shown.get(view.slot) == shown:
            return
        self._shown[view.slot] = shown
        log = self._log.error if view.state == "failed" else self._log.info
        log(
            "slot changed",
            slot=view.slot,
            incarnation=view.incarnation,
            state=view.state,
            pid=view.pid,
            detail=view.detail,
        )
        if view.state == "ready" and (words := self._models.new_words(view)):
            fields = {subject.replace(" ", "_"): text for subject, text in words.items()}
            self._log.info("model loaded", model=view.model, **fields)

    def front_end_ready(self, host: str, port: int) -> None:
        self._log.info("front end is ready", host=host, port=port)

    def note(self, text: str, about: About = NOBODY) -> None:
        log = self._log.warning if about.bad else self._log.info
        log(text, **({"slot": about.slot, "incarnation": about.incarnation} if about.slot else {}))

    def close(self) -> None:
        """Does nothing: log lines need no end."""
