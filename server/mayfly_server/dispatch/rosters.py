"""The latest roster of every node: the list of the node's workers and their states, and its age.

A node that sends no rosters any more may only be unreachable: the streams of its workers go on, but
its workers get no new requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mayfly_protocol.roster import Loss, Roster, SlotView


@dataclass(frozen=True, slots=True)
class Incarnation:
    """The unique name of one worker process. ``slot`` is its place on the ``node``, ``epoch`` names
    the reaper process that started it, and ``number`` is unique among that reaper's worker
    processes."""

    node: str
    epoch: str
    slot: str
    number: int


@dataclass(frozen=True, slots=True)
class Slot:
    """A slot: a place of a node for one worker process at a time. The state of its worker is taken
    from the node's latest roster, the list that the node's reaper sends.

    Attributes:
        address: the node's address in the front end's settings.
        epoch: names the process of the node's reaper; it changes when the reaper starts again.
        view: the worker in the slot, and its state.
        heard_at: the time at which the roster came.
        silent: no roster has come from the node for ``roster_silence_s`` seconds.
    """

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
        """The slot's name, ``node/slot``; it stays the same when the slot's worker process is
        replaced."""
        return f"{self.node}/{self.view.slot}"

    @property
    def capacity(self) -> int:
        """The number of sequences that the worker can run in one batch; 1 if it is not known."""
        return max(1, self.view.card.rows) if self.view.card is not None else 1


EPOCHS_REMEMBERED = 16
"""Number of ended reaper processes of one address that are remembered, so that their late messages
are ignored. A reaper is the process that watches a node's workers."""


@dataclass(frozen=True, slots=True)
class _Heard:
    """A roster (a node's list of its workers), and the time at which it came."""

    roster: Roster
    at: float
    void: tuple[str, ...] = ()
    """Epochs of the reaper processes that were at this address before; their rosters are
    ignored."""


class Rosters:
    """The latest roster (list of the workers and their states) of each node, by the node's address.
    Times are on the caller's monotonic clock. A node is silent if no roster has come from it for
    ``silence_s`` seconds.

    If a roster of a new reaper process comes from an address, rosters of the earlier reapers there,
    which may still come over a slower connection, are ignored.
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._heard: dict[str, _Heard] = {}

    def update(self, address: str, roster: Roster, now: float) -> bool:
        """Takes a node's roster, the list of its workers. Returns False if the roster was ignored,
        because it is older than the latest one from this address."""
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
        """Drops what the node at this address has sent, because the node is no longer used."""
        self._heard.pop(address, None)

    def __contains__(self, address: str) -> bool:
        """True if the node at this address has sent the list of its workers."""
        return address in self._heard

    def __bool__(self) -> bool:
        return bool(self._heard)

    def nodes(self, now: float) -> Iterator[tuple[Roster, bool]]:
        """Yields each node's latest roster, the list of its workers, and True if the node is
        silent: has sent no roster for ``silence_s`` seconds."""
        for heard in self._heard.values():
            yield heard.roster, now - heard.at > self._silence_s

    def slots(self, now: float) -> Iterator[Slot]:
        """Yields every slot of every node, with the state of its worker."""
        for address, heard in self._heard.items():
            silent = now - heard.at > self._silence_s
            for view in heard.roster.slots:
                yield Slot(address, heard.roster.node, heard.roster.epoch, view, heard.at, silent)

    def is_gone(self, incarnation: Incarnation) -> bool:
        """True if the reaper that watches a worker does not list it as ready or draining any more.

        False if the node has a new reaper process, which does not know the old one's workers. These
        workers finish their requests and end; the front end sees that by their connections.
        """
        for roster in self._of(incarnation):
            return not any(
                view.slot == incarnation.slot
                and view.incarnation == incarnation.number
                and view.state in ("ready", "draining")
                for view in roster.slots
            )
        return False

    def lists(self, incarnation: Incarnation) -> bool:
        """True if the latest roster of the reaper that watches a worker has the worker, or its
        loss."""
        return self.loss(incarnation) is not None or any(
            (view.slot, view.incarnation) == (incarnation.slot, incarnation.number)
            for roster in self._of(incarnation)
            for view in roster.slots
        )

    def loss(self, incarnation: Incarnation) -> Loss | None:
        """The cause of a worker's loss, as the reaper that watched the worker found it; None if the
        reaper's latest roster has none. Rosters list a loss for one minute."""
        for roster in self._of(incarnation):
            for loss in roster.losses:
                if (loss.slot, loss.incarnation) == (incarnation.slot, incarnation.number):
                    return loss
        return None

    def is_watched(self, incarnation: Incarnation, now: float) -> bool:
        """True if messages of the reaper that watches a worker arrive, so that the reaper can still
        tell the cause of the worker's loss."""
        return any(
            now - heard.at <= self._silence_s
            for heard in self._heard.values()
            if _is_from(heard.roster, incarnation)
        )

    def _of(self, incarnation: Incarnation) -> Iterator[Roster]:
        return (h.roster for h in self._heard.values() if _is_from(h.roster, incarnation))


def _is_from(roster: Roster, incarnation: Incarnation) -> bool:
    return (roster.node, roster.epoch) == (incarnation.node, incarnation.epoch)
