"""Reports of a node's events to its operator, who may have closed the terminal that shows them:
errors of output must not end the node."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from mayfly_protocol.roster import SlotView

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class About:
    """The worker that a note to the operator is about; ``slot`` is empty if the note is about no
    worker. ``bad`` marks losses and faults."""

    slot: str = ""
    incarnation: int = 0
    bad: bool = False


NOBODY = About()


class Observer(Protocol):
    """Receives the events of a node for its operator. Its methods are called on the reaper's own
    thread and must not block."""

    def slot_changed(self, view: SlotView) -> None:
        """Receives a slot whose state, load progress or detail text has changed."""

    def front_end_ready(self, host: str, port: int) -> None:
        """Receives the address of the supervised front end when it has answered for the first
        time."""

    def note(self, text: str, about: About = NOBODY) -> None:
        """Receives a sentence for the operator, such as the reason of a worker's loss."""


class SafeObserver:
    """Passes a node's events on to another observer, until that observer raises OSError: a closed
    terminal, or a pipe that nobody reads, must not end the workers. All later events are
    dropped."""

    def __init__(self, observer: Observer) -> None:
        self._observer: Observer | None = observer

    def slot_changed(self, view: SlotView) -> None:
        self._call(lambda observer: observer.slot_changed(view))

    def front_end_ready(self, host: str, port: int) -> None:
        self._call(lambda observer: observer.front_end_ready(host, port))

    def note(self, text: str, about: About = NOBODY) -> None:
        self._call(lambda observer: observer.note(text, about))

    def _call(self, method: Callable[[Observer], None]) -> None:
        if self._observer is None:
            return
        try:
            method(self._observer)
        except OSError as error:
            self._observer = None
            _log.warning(
                "the operator's terminal cannot be written to, no more events are shown: %s", error
            )
