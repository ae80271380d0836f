"""``GET /mayfly/status``: the nodes and their slots as they were last heard of.

How fast workers write, from what they say they have written so far.

``GET /mayfly/events``: the status again whenever something in it changes, as server-sent events.

Each event is the full picture, as rosters are, with the tokens per second of every worker; so a
client that lost its connection is right again with its first event. The last one of a front end
that leaves says so.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Hashable, Mapping
from typing import Any, TypeVar

from fastapi import APIRouter
from fastapi.responses import StreamingResponse

from mayfly_protocol import PROTOCOL_VERSION
from mayfly_protocol.counters import STATUS
from mayfly_protocol.faults import KINDS
from mayfly_protocol.roster import Autopsy, Loss, Roster, SlotView
from mayfly_server.api.dependencies import FrontDep
from mayfly_server.api.schemas.server import Status
from mayfly_server.dispatch.fleet import Fleet
from mayfly_server.http import sse

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
        "rows": view.card.rows if view.card else 0,
        **{name: getattr(view, name) for name in STATUS},
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


Who = TypeVar("Who", bound=Hashable)

WINDOW_S = 3.0
"""Workers say every half second how far they are: within one, a rate would be noise."""
SHORTEST_S = 0.9


class Pace:
    """Rates over the last :data:`WINDOW_S` seconds. Times are on the caller's monotonic clock."""

    def __init__(self) -> None:
        self._heard: dict[Hashable, deque[tuple[float, int]]] = {}

    def hear(self, totals: Mapping[Who, int], now: float) -> dict[Who, float | None]:
        """Takes in how many tokens each one has written since it began, and returns tokens per
        second; None for one that has not been heard for long enough. Who is not named is
        forgotten."""
        self._heard = {who: self._heard.get(who, deque()) for who in totals}
        rates: dict[Who, float | None] = {}
        for who, total in totals.items():
            heard = self._heard[who]
            heard.append((now, total))
            while len(heard) > 2 and heard[1][0] <= now - WINDOW_S:
                heard.popleft()
            began, before = heard[0]
            elapsed = now - began
            rates[who] = (total - before) / elapsed if elapsed >= SHORTEST_S else None
        return rates


live_router = APIRouter(include_in_schema=False)  # a document of it would say that it ends

SOONEST_S = 0.1
"""Between two events, however much happens."""
LATEST_S = 1.0


@live_router.get("/mayfly/events")
async def events(front: FrontDep) -> StreamingResponse:
    return StreamingResponse(_stream(front.fleet), headers=sse.HEADERS)


async def _stream(fleet: Fleet) -> AsyncIterator[str]:
    pace = Pace()
    while True:
        change = fleet.next_change
        yield sse.event(_picture(fleet, pace))
        if fleet.leaving:
            return
        await asyncio.sleep(SOONEST_S)
        await fleet.changed(LATEST_S, since=change)


def _picture(fleet: Fleet, pace: Pace) -> dict[str, Any]:
    shown = picture(fleet)
    workers = {
        (node["node"], node["epoch"], slot["slot"], slot["incarnation"]): slot
        for node in shown["nodes"]
        for slot in node["slots"]
    }
    written = {who: slot["generated_tokens"] for who, slot in workers.items()}
    rates = pace.hear(written, time.monotonic())
    for who, slot in workers.items():
        rate = rates[who]
        slot["tokens_per_s"] = None if rate is None else round(rate, 1)
    return {**shown, "leaving": fleet.leaving}
