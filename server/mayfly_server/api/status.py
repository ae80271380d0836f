"""``GET /mayfly/status``: the nodes and their slots as they were last heard of."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from mayfly_protocol.roster import Roster, SlotView
from mayfly_server.api.front import FrontDep
from mayfly_server.api.schemas.server import Status

router = APIRouter()


@router.get("/mayfly/status", response_model=None, responses={200: {"model": Status}})
async def status(front: FrontDep) -> dict[str, Any]:
    """Every node and its slots, as they were last heard of."""
    return {"nodes": [_node(roster, silent) for roster, silent in front.fleet.nodes()]}


def _node(roster: Roster, silent: bool) -> dict[str, Any]:
    return {
        "node": roster.node,
        "pid": roster.pid,
        "epoch": roster.epoch,
        "silent": silent,
        "slots": [_slot(view) for view in roster.slots],
        "losses": [
            {
                "slot": loss.slot,
                "incarnation": loss.incarnation,
                "kind": loss.kind,
                "scope": loss.scope,
                "age_s": round(loss.age_s, 3),
            }
            for loss in roster.losses
        ],
    }


def _slot(view: SlotView) -> dict[str, Any]:
    """Sizes are bytes, times seconds."""
    return {
        "slot": view.slot,
        "model": view.model,
        "state": view.state,
        "incarnation": view.incarnation,
        "pid": view.pid,
        "running": view.running,
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
    }
