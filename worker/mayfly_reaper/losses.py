"""Who may have killed a worker, and telling everyone that it is lost."""

from __future__ import annotations

from mayfly_protocol.breadcrumb import Breadcrumb
from mayfly_protocol.roster import Loss
from mayfly_reaper.incarnation import Incarnation
from mayfly_reaper.redaction import redacted
from mayfly_reaper.verdict import Verdict


def suspicion(
    life: Incarnation, verdict: Verdict, crumb: Breadcrumb | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The suspects and the marked.

    What the worker wrote before its last forward pass goes before what it said afterwards. Nobody
    is suspected where the fault is surely not a request's: somebody's SIGKILL, another process's
    reset of the GPU.
    """
    if not verdict.blames_requests:
        return (), ()
    if crumb is not None:
        return crumb.suspects, crumb.marked
    return (life.fault.suspects if life.fault is not None else ()), ()


def loss_of(slot: str, life: Incarnation, verdict: Verdict, crumb: Breadcrumb | None) -> Loss:
    """What a roster says of a worker that has just been lost."""
    suspects, marked = suspicion(life, verdict, crumb)
    return Loss(
        slot=slot,
        incarnation=life.number,
        kind=verdict.kind,
        scope=verdict.scope,
        first_cause=redacted(verdict.first.text),
        age_s=0.0,
        suspects=suspects,
        marked=marked,
    )
