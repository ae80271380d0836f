"""What the slots of a model promise to a request that no worker can take right now."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mayfly_protocol.roster import SlotView
from mayfly_server.pool.roster import Incarnation, Slot

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
