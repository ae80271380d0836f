"""The latest roster of every node, and its age.

A node that has gone silent keeps its workers: they may well be alive, their streams go on, and they
only get no new work.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mayfly_protocol.roster import Loss, Roster, SlotView


@dataclass(frozen=True, slots=True)
class Incarnation:
    """The name of one worker process: no other one, before or after it, has the same."""

    node: str
    epoch: str
    slot: str
    number: int


@dataclass(frozen=True, slots=True)
class Slot:
    """A slot of a node, by the latest roster; ``address`` is the node's."""

    address: str
    node: str
    epoch: str
    view: SlotView
    heard_at: float
    silent: bool

    @property
    def incarnation(self) -> Incarnation:
        return Incarnation(self.node, self.epoch, self.view.slot, self.view.incarnation)

    @property
    def name(self) -> str:
        """The slot's name, which all its incarnations share."""
        return f"{self.node}/{self.view.slot}"

    @property
    def capacity(self) -> int:
        """The number of requests that the worker says it can run together."""
        return max(1, self.view.card.rows) if self.view.card is not None else 1


EPOCHS_REMEMBERED = 16
"""Void reapers of one address that are remembered."""


@dataclass(frozen=True, slots=True)
class _Heard:
    """A roster, and when it came."""

    roster: Roster
    at: float
    void: tuple[str, ...] = ()
    """Epochs of reapers that were at this address before."""


class Rosters:
    """The latest roster of each node, by the address it was heard at. Times are on the caller's
    monotonic clock.

    A new reaper at an address makes the ones before it void, with all of their incarnations: their
    rosters that still come, over a slower connection, change nothing.
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._heard: dict[str, _Heard] = {}

    def update(self, address: str, roster: Roster, now: float) -> bool:
        """Takes a roster, unless it is older than the known one. Returns whether it was taken."""
        known = self._heard.get(address)
        void: tuple[str, ...] = ()
        if known is not None:
            void = known.void
            if roster.epoch in void:
                return False
            if roster.epoch != known.roster.epoch:
                void = (*void, known.roster.epoch)[-EPOCHS_REMEMBERED:]
            elif roster.revision < known.roster.revision:
                return False
        self._heard[address] = _Heard(roster, now, void)
        return True

    def forget(self, address: str) -> None:
        """Drops what was heard at an address."""
        self._heard.pop(address, None)

    def __contains__(self, address: str) -> bool:
        """Tells whether a roster was ever heard at an address."""
        return address in self._heard

    def __bool__(self) -> bool:
        return bool(self._heard)

    def nodes(self, now: float) -> Iterator[tuple[Roster, bool]]:
        """Yields every node's roster, and whether the node has been silent since."""
        for heard in self._heard.values():
            yield heard.roster, now - heard.at > self._silence_s

    def slots(self, now: float) -> Iterator[Slot]:
        """Yields every slot of every node."""
        for address, heard in self._heard.items():
            silent = now - heard.at > self._silence_s
            for view in heard.roster.slots:
                yield Slot(address, heard.roster.node, heard.roster.epoch, view, heard.at, silent)

    def is_gone(self, incarnation: Incarnation) -> bool:
        """Tells whether a worker's own reaper says that it no longer serves.

        A reaper that is itself new (another epoch) says nothing about the workers of the one
        before it: those finish what they have, and the ends of their connections say the rest.
        """
        for roster in self._of(incarnation):
            return not any(
                view.slot == incarnation.slot
                and view.incarnation == incarnation.number
                and view.state in ("ready", "draining")
                for view in roster.slots
            )
        return False

    def loss(self, incarnation: Incarnation) -> Loss | None:
        """A lost worker's verdict by its own reaper; there for a minute after the loss."""
        for roster in self._of(incarnation):
            for loss in roster.losses:
                if (loss.slot, loss.incarnation) == (incarnation.slot, incarnation.number):
                    return loss
        return None

    def is_watched(self, incarnation: Incarnation, now: float) -> bool:
        """Tells whether a worker's own reaper is heard, so that a verdict on it can come."""
        return any(
            now - heard.at <= self._silence_s
            for heard in self._heard.values()
            if _is_from(heard.roster, incarnation)
        )

    def _of(self, incarnation: Incarnation) -> Iterator[Roster]:
        return (h.roster for h in self._heard.values() if _is_from(h.roster, incarnation))


def _is_from(roster: Roster, incarnation: Incarnation) -> bool:
    return (roster.node, roster.epoch) == (incarnation.node, incarnation.epoch)
