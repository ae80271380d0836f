"""Telling the operator, who may have gone away."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from mayfly_protocol.roster import SlotView

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class About:
    """The worker that a note is about, if it is about one; ``bad`` marks losses and faults."""

    slot: str = ""
    incarnation: int = 0
    bad: bool = False


NOBODY = About()


class Observer(Protocol):
    """Receives the events of a node, on the reaper's own thread; must not block."""

    def slot_changed(self, view: SlotView) -> None:
        """Receives a slot whose state, load progress or detail has changed."""

    def front_end_ready(self, host: str, port: int) -> None:
        """Receives the address of the supervised front end when it has answered for the first
        time."""

    def note(self, text: str, about: About = NOBODY) -> None:
        """Receives a sentence for the operator, such as the reason of a loss."""


class Once:
    """Says each thing once: what fails again and again is no news."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said: set[str] = set()

    def __call__(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(text)


class Teller:
    """An observer in front of another one. A terminal that was closed or a pipe that nobody reads
    any more ends the telling, and must not end the workers."""

    def __init__(self, observer: Observer) -> None:
        self._observer: Observer | None = observer

    def slot_changed(self, view: SlotView) -> None:
        if self._observer is not None:
            try:
                self._observer.slot_changed(view)
            except OSError as error:
                self._give_up(error)

    def front_end_ready(self, host: str, port: int) -> None:
        if self._observer is not None:
            try:
                self._observer.front_end_ready(host, port)
            except OSError as error:
                self._give_up(error)

    def note(self, text: str, about: About = NOBODY) -> None:
        if self._observer is not None:
            try:
                self._observer.note(text, about)
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._observer = None
        _log.warning("nobody can be told any more what happens here: %s", error)
