"""Probes. They look at what is known already and ask nobody, so that they answer at once."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from mayfly_server.api.dependencies import FrontDep
from mayfly_server.api.schemas.server import Alive, NotReady, Ready
from mayfly_server.errors import Unavailable

router = APIRouter()

_READY: dict[int | str, dict[str, Any]] = {
    200: {"model": Ready},
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
    """Whether a request would be taken now: 200, or 503. Where all is not well a word says so, and
    the reason, unless the caller lacks a key that others need."""
    fleet = front.fleet
    if fleet.leaving:
        return _unavailable(request, "the server is shutting down", 1.0)
    if not fleet.ready_workers():
        outlook = fleet.outlook()
        return _unavailable(request, outlook.reason, outlook.ready_in_s)
    if still := fleet.standing_still():
        return JSONResponse(_words(request, "stalled", _standstill(still)))
    return JSONResponse({"status": "ok"})


def _unavailable(request: Request, reason: str, ready_in_s: float) -> JSONResponse:
    words = _words(request, "unavailable", reason)
    headers = Unavailable(reason, retry_after_s=ready_in_s).headers() if "reason" in words else None
    return JSONResponse(words, 503, headers)


def _words(request: Request, status: str, reason: str) -> dict[str, str]:
    guest = getattr(request.state, "guest", False)
    return {"status": status} if guest else {"status": status, "reason": reason}


def _standstill(still: dict[str, float]) -> str:
    told = (f"{model} for {seconds:.0f} s" for model, seconds in sorted(still.items()))
    return f"workers have something to do and have not moved: {', '.join(told)}"
