"""What ``mayfly serve`` and ``mayfly node`` show where their output is read by programs: every
event is a line of the log (``--log-format json``)."""

from __future__ import annotations

import structlog

from mayfly_protocol.roster import SlotView
from mayfly_reaper.settings import NOBODY, About


class LogLines:
    """A :class:`mayfly_server.cli.progress.Audience` that says no more than what changes."""

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
