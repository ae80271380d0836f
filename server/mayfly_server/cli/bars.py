"""Progress bars, for a person at a terminal."""

from __future__ import annotations

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

from mayfly_server.cli.progress import measure

_OVER_ECHO = Control(ControlType.CARRIAGE_RETURN)
"""A terminal echoes Ctrl-C as ``^C``; the line that answers it is written over that."""


class Bars:
    """A :class:`mayfly_server.cli.progress.Renderer` that draws a bar an activity.

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
