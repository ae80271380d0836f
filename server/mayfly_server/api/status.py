"""``GET /mayfly/status``: the nodes and their slots as they were last heard of."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from mayfly_protocol import PROTOCOL_VERSION
from mayfly_protocol.faults import KINDS
from mayfly_protocol.roster import Autopsy, Loss, Roster, SlotView
from mayfly_server.api.front import FrontDep
from mayfly_server.api.schemas.server import Status
from mayfly_server.pool.fleet import Fleet

router = APIRouter()


@router.get("/mayfly/status", response_model=None, responses={200: {"model": Status}})
async def status(front: FrontDep) -> dict[str, Any]:
    """Every node and its slots, as they were last heard of."""
    return picture(front.fleet)


def picture(fleet: Fleet) -> dict[str, Any]:
    """All that is known. Sizes are bytes, times seconds."""
    return {"nodes": [_node(roster, silent) for roster, silent in fleet.nodes()]}


def _node(roster: Roster, silent: bool) -> dict[str, Any]:
    return {
        "node": roster.node,
        "pid": roster.pid,
        "epoch": roster.epoch,
        "protocol": f"{PROTOCOL_VERSION}.{roster.minor}",
        "silent": silent,
        "refused": roster.refused,
        "slots": [_slot(view) for view in roster.slots],
        "losses": [_loss(loss) for loss in roster.losses],
        "autopsies": [_autopsy(autopsy) for autopsy in roster.autopsies],
    }


def _slot(view: SlotView) -> dict[str, Any]:
    return {
        "slot": view.slot,
        "model": view.model,
        "state": view.state,
        "incarnation": view.incarnation,
        "pid": view.pid,
        "running": view.running,
        "rows": view.card.rows if view.card else 0,
        "inferences": view.inferences,
        "waiting": view.waiting,
        "generated_tokens": view.generated_tokens,
        "phase": view.phase,
        "load_done": view.load_done,
        "load_total": view.load_total,
        "footprint": view.memory.footprint,
        "age_s": round(view.age_s, 3),
        "retry_in_s": view.retry_in_s,
        "detail": view.detail,
        "trial": view.trial,
    }


def _loss(loss: Loss) -> dict[str, Any]:
    return {
        "slot": loss.slot,
        "incarnation": loss.incarnation,
        "kind": loss.kind,
        "scope": loss.scope,
        "first_cause": loss.first_cause,
        "age_s": round(loss.age_s, 3),
    }


def _autopsy(autopsy: Autopsy) -> dict[str, Any]:
    """With what its kind means, and what there is to do about it."""
    kind = KINDS.get(autopsy.kind)
    return {
        "id": autopsy.id,
        "slot": autopsy.slot,
        "model": autopsy.model,
        "incarnation": autopsy.incarnation,
        "pid": autopsy.pid,
        "kind": autopsy.kind,
        "scope": autopsy.scope,
        "first_cause": autopsy.first_cause,
        "meaning": kind.meaning if kind else "",
        "advice": kind.advice if kind else "",
        "phase": autopsy.phase,
        "inferences": autopsy.inferences,
        "running": autopsy.running,
        "lived_s": autopsy.lived_s,
        "done": autopsy.done,
        "age_s": round(autopsy.age_s, 3),
    }
