"""What a slot wants done."""

from __future__ import annotations

from dataclasses import dataclass

from mayfly_protocol.lifecycle import ToSlot
from mayfly_protocol.roster import SlotState
from mayfly_reaper.incarnation import Incarnation
from mayfly_reaper.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start a process; to be answered with ``Started`` or ``NotStarted``."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class Send:
    incarnation: int
    message: ToSlot


@dataclass(frozen=True, slots=True)
class Signal:
    incarnation: int
    number: int


@dataclass(frozen=True, slots=True)
class Record:
    """A worker ended without being asked to: ``state`` is the one it was in, ``done`` what
    follows."""

    life: Incarnation
    verdict: Verdict
    state: SlotState
    done: str


Action = Spawn | Send | Signal | Record
