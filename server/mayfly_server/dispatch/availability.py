"""Availability of a model without a ready worker: whether a worker is going to be ready, and when.

The ``Retry-After`` header of the 503 that answers a request for such a model is computed here, from
the states of the model's workers in the nodes' rosters. (The ``Retry-After`` of a full queue comes
from the worker, that of an exceeded quota from :mod:`mayfly_server.http.rate_limit`.)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mayfly_protocol.roster import SlotView
from mayfly_server.dispatch.rosters import Incarnation, Slot
from mayfly_server.errors import Unavailable

_SOON_S = 1.0
_TYPICAL_LOAD_S = 5.0
_LONGEST_LOAD_S = 600.0


@dataclass(frozen=True, slots=True)
class Availability:
    """The prospect that a worker of a model will be ready for a request.

    Attributes:
        coming: a worker is expected to be ready without the operator's help.
        failed: no worker can be ready before the operator acts. If ``coming`` is false, too, it is
            not known whether a worker will be ready.
        retry_after_s: estimated seconds until a worker is ready, sent to clients as Retry-After.
        reason: the reason why no worker is ready, as a text for the client.
        pause_s: seconds until the start of a worker is even tried again, after failed starts; part
            of ``retry_after_s``.
    """

    coming: bool
    failed: bool
    retry_after_s: float
    reason: str
    pause_s: float = 0.0

    def error(self, model: str) -> Unavailable:
        """The error with HTTP status 503 that answers a request for this model."""
        return Unavailable(
            f"No worker of {model} is ready: {self.reason}.",
            code="model_failed" if self.failed else None,
            retry_after_s=self.retry_after_s,
        )


def availability(slots: Sequence[Slot], connected: Collection[Incarnation] = ()) -> Availability:
    """Estimates when a worker of a model will be ready, from the model's ``slots`` (each is a place
    of a node for one worker process at a time): the slot that will be ready first decides. Workers
    in ``connected`` can take requests already; the caller has tried them in vain."""
    if not slots:
        return Availability(False, False, _TYPICAL_LOAD_S, "no worker is known")
    heard = [slot.view for slot in slots if not slot.silent]
    if any(slot.incarnation in connected for slot in slots):
        return Availability(True, False, _SOON_S, "its workers are busy, or did not answer in time")
    if not heard:
        return Availability(False, False, _TYPICAL_LOAD_S, "its node does not answer")
    hopeful = [view for view in heard if view.state != "failed"]
    if not hopeful:
        return Availability(False, True, _TYPICAL_LOAD_S, "its workers cannot start")
    nearest = min(hopeful, key=retry_after_s)
    pause_s = (nearest.retry_in_s or 0.0) if nearest.state == "backoff" else 0.0
    return Availability(True, False, retry_after_s(nearest), _reason(nearest), pause_s)


def retry_after_s(view: SlotView) -> float:
    """Estimates in how many seconds the worker of a slot will be ready, by the slot's state."""
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
