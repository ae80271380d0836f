"""``GET /mayfly/events``: the status again whenever something in it changes, as server-sent events.

Each event is the full picture, as rosters are, with the tokens per second of every worker; so a
client that lost its connection is right again with its first event. The last one of a front end
that leaves says so.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter
from fastapi.responses import StreamingResponse

from mayfly_server.api import sse
from mayfly_server.api.front import FrontDep
from mayfly_server.api.status import picture
from mayfly_server.pool.fleet import Fleet
from mayfly_server.pool.pace import Pace

router = APIRouter(include_in_schema=False)  # a document of it would say that it ends

SOONEST_S = 0.1
"""Between two events, however much happens."""
LATEST_S = 1.0


@router.get("/mayfly/events")
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
