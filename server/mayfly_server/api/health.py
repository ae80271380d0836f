"""Probes. They look at what is known already and ask nobody, so that they answer at once."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from mayfly_server.api.front import FrontDep
from mayfly_server.api.schemas.server import Alive, NotReady
from mayfly_server.errors import Unavailable

router = APIRouter()

_READY: dict[int | str, dict[str, Any]] = {
    200: {"model": Alive},
    503: {"model": NotReady, "description": "No request would be taken now."},
}


# Load balancers may ask for the head alone; FastAPI, unlike Starlette, adds no HEAD by itself.
@router.head("/livez", include_in_schema=False)
@router.get("/livez", response_model=None, responses={200: {"model": Alive}})
async def alive() -> dict[str, Any]:
    """This process answers."""
    return {"status": "ok"}


@router.head("/health", include_in_schema=False)
@router.head("/readyz", include_in_schema=False)
@router.get("/health", name="health", response_model=None, responses=_READY)
@router.get("/readyz", response_model=None, responses=_READY)
async def ready(request: Request, front: FrontDep) -> JSONResponse:
    """Whether a request would be taken now: 200, or 503 with the reason, unless the caller lacks a
    key that others need."""
    if front.fleet.leaving:
        reason, ready_in_s = "the server is shutting down", 1.0
    elif front.fleet.ready_workers():
        return JSONResponse({"status": "ok"})
    else:
        outlook = front.fleet.outlook()
        reason, ready_in_s = outlook.reason, outlook.ready_in_s
    if getattr(request.state, "guest", False):
        return JSONResponse({"status": "unavailable"}, 503)
    headers = Unavailable(reason, retry_after_s=ready_in_s).headers()
    return JSONResponse({"status": "unavailable", "reason": reason}, 503, headers)
