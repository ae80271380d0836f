"""What the slots of a model promise to a request that no worker can take right now.

What the nodes last said about themselves, and how long ago.

A node that has gone silent keeps the workers it had: they may well be alive, their streams go on,
and they only get no new work.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
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
    """One slot of a node as it was last heard of; ``address`` is the node's."""

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
        """The same for every incarnation."""
        return f"{self.node}/{self.view.slot}"

    @property
    def capacity(self) -> int:
        """How many requests its worker can run together, by what it says."""
        return max(1, self.view.card.rows) if self.view.card is not None else 1


EPOCHS_REMEMBERED = 16


@dataclass(frozen=True, slots=True)
class _Heard:
    roster: Roster
    at: float
    void: tuple[str, ...] = ()
    """Epochs of reapers that were at this address before."""


class Rosters:
    """The latest roster of each node, by the address it was heard at. Times are on the caller's
    monotonic clock.

    A reaper that is new at an address voids the ones before it, and all of their incarnations: what
    still comes of them, over a connection that is slower than another one, changes nothing.
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._heard: dict[str, _Heard] = {}

    def hear(self, address: str, roster: Roster, now: float) -> bool:
        """Takes a roster in, unless it is older than the one that is known. Returns whether."""
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
        """Nothing that was said there counts any more."""
        self._heard.pop(address, None)

    def __contains__(self, address: str) -> bool:
        """Whether anything was ever heard there."""
        return address in self._heard

    def __bool__(self) -> bool:
        return bool(self._heard)

    def nodes(self, now: float) -> Iterator[tuple[Roster, bool]]:
        """Every node's roster, and whether it has been silent since."""
        for heard in self._heard.values():
            yield heard.roster, now - heard.at > self._silence_s

    def slots(self, now: float) -> Iterator[Slot]:
        for address, heard in self._heard.items():
            silent = now - heard.at > self._silence_s
            for view in heard.roster.slots:
                yield Slot(address, heard.roster.node, heard.roster.epoch, view, heard.at, silent)

    def gone(self, incarnation: Incarnation) -> bool:
        """Whether its own reaper says that this worker no longer serves.

        A reaper that is itself new (another epoch) says nothing about the workers of the one
        before it: those finish what they have, and their connections tell when they are gone.
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
        """What this worker's own reaper says of its end, for a minute after it."""
        for roster in self._of(incarnation):
            for loss in roster.losses:
                if (loss.slot, loss.incarnation) == (incarnation.slot, incarnation.number):
                    return loss
        return None

    def watched(self, incarnation: Incarnation, now: float) -> bool:
        """Whether this worker's own reaper is there to say what becomes of it."""
        return any(
            now - heard.at <= self._silence_s
            for heard in self._heard.values()
            if _is_from(heard.roster, incarnation)
        )

    def _of(self, incarnation: Incarnation) -> Iterator[Roster]:
        return (h.roster for h in self._heard.values() if _is_from(h.roster, incarnation))


def _is_from(roster: Roster, incarnation: Incarnation) -> bool:
    return (roster.node, roster.epoch) == (incarnation.node, incarnation.epoch)


_SOON_S = 1.0
_TYPICAL_LOAD_S = 5.0
_LONGEST_LOAD_S = 600.0


@dataclass(frozen=True, slots=True)
class Outlook:
    """``coming``: a worker will be ready without anybody's help, in about ``ready_in_s`` seconds,
    of which nothing is done in the first ``pause_s``. ``failed``: none ever will. Neither: nobody
    knows. ``reason`` is for the client."""

    coming: bool
    failed: bool
    ready_in_s: float
    reason: str
    pause_s: float = 0.0


def outlook(slots: Sequence[Slot], connected: Collection[Incarnation] = ()) -> Outlook:
    """Judges by the most hopeful of the slots. With one that is ready and ``connected``, who asks
    has been there."""
    if not slots:
        return Outlook(False, False, _TYPICAL_LOAD_S, "no worker is known")
    heard = [slot.view for slot in slots if not slot.silent]
    if any(slot.incarnation in connected for slot in slots):
        return Outlook(True, False, _SOON_S, "its workers are busy, or did not answer in time")
    if not heard:
        return Outlook(False, False, _TYPICAL_LOAD_S, "its node does not answer")
    hopeful = [view for view in heard if view.state != "failed"]
    if not hopeful:
        return Outlook(False, True, _TYPICAL_LOAD_S, "its workers cannot start")
    nearest = min(hopeful, key=_ready_in_s)
    pause_s = (nearest.retry_in_s or 0.0) if nearest.state == "backoff" else 0.0
    return Outlook(True, False, _ready_in_s(nearest), _reason(nearest), pause_s)


def _ready_in_s(view: SlotView) -> float:
    match view.state:
        case "ready":
            return _SOON_S
        case "backoff":
            return (view.retry_in_s or 0.0) + _TYPICAL_LOAD_S
        case "loading" if 0 < view.load_done < view.load_total:
            left = view.age_s * (view.load_total - view.load_done) / view.load_done
            return min(max(left, _SOON_S), _LONGEST_LOAD_S)
        case _:
            return _TYPICAL_LOAD_S


def _reason(view: SlotView) -> str:
    match view.state:
        case "ready":
            return "its worker is being connected to"
        case "backoff":
            return "its worker will be started again after a pause"
        case "loading" if view.load_total:
            return f"it is being loaded ({100 * view.load_done // view.load_total} %)"
        case "spawning" | "loading" | "canary":
            return "it is being loaded"
        case _:
            return "its worker is being replaced"
