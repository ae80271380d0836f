"""The health probes ``/livez``, ``/readyz`` and ``/health`` of a front end, the process that serves
HTTP. The probes report only what the front end knows already, without asking workers or nodes, so
they answer at once."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import Field

from mayfly_server.api.dependencies import FrontDep
from mayfly_server.api.openapi import AnswerObject
from mayfly_server.errors import Unavailable

router = APIRouter()

Reason = Annotated[
    str, Field(description="Absent if API keys are configured and the caller sent no valid key.")
]


class AliveAnswer(AnswerObject):
    status: Literal["ok"]


class ReadyAnswer(AnswerObject):
    status: Annotated[
        Literal["ok", "stalled"],
        Field(
            description="Stalled: the workers of a model are busy and have made no progress for "
            "seconds. The server still takes requests; if a stalled worker dies, another worker "
            "answers its requests."
        ),
    ]
    reason: NotRequired[Reason]


class NotReadyAnswer(AnswerObject):
    status: Literal["unavailable"]
    reason: NotRequired[Reason]


_READY: dict[int | str, dict[str, Any]] = {
    200: {"model": ReadyAnswer},
    503: {"model": NotReadyAnswer, "description": "The server would refuse requests now."},
}


# Load balancers may probe with HEAD; FastAPI, unlike Starlette, adds no HEAD route by itself.
@router.head("/livez", include_in_schema=False)
@router.get("/livez", response_model=None, responses={200: {"model": AliveAnswer}})
async def alive() -> AliveAnswer:
    """Answers 200 as long as the front end's process can answer at all."""
    return {"status": "ok"}


@router.head("/health", include_in_schema=False)
@router.head("/readyz", include_in_schema=False)
@router.get("/health", name="health", response_model=None, responses=_READY)
@router.get("/readyz", response_model=None, responses=_READY)
async def ready(request: Request, front: FrontDep) -> JSONResponse:
    """Answers 200 if the server would accept a request now, else 503. The field ``status`` names
    the problem, if any; ``reason`` explains the problem, unless API keys are configured and the
    caller sent no valid key."""
    fleet = front.fleet
    if fleet.leaving:
        return _not_ready(request, "the server is shutting down", 1.0)
    if not fleet.ready_workers():
        prospects = fleet.availability()
        return _not_ready(request, prospects.reason, prospects.retry_after_s)
    content: ReadyAnswer = {"status": "ok"}
    if stalled := fleet.stalled_models():
        content["status"] = "stalled"
        if _may_see_reasons(request):
            content["reason"] = _stall(stalled)
    return JSONResponse(content)


def _not_ready(request: Request, reason: str, ready_in_s: float) -> JSONResponse:
    content: NotReadyAnswer = {"status": "unavailable"}
    if not _may_see_reasons(request):
        return JSONResponse(content, 503)
    content["reason"] = reason
    return JSONResponse(content, 503, Unavailable(reason, retry_after_s=ready_in_s).headers())


def _may_see_reasons(request: Request) -> bool:
    return not getattr(request.state, "guest", False)


def _stall(stalled: dict[str, float]) -> str:
    models = (f"{model} for {seconds:.0f} s" for model, seconds in sorted(stalled.items()))
    return f"workers are busy and have made no progress: {', '.join(models)}"
