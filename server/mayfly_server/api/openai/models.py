"""``GET /v1/models``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from mayfly_server.api.dependencies import Front, FrontDep
from mayfly_server.api.schemas.server import ServedModel as Shown
from mayfly_server.api.schemas.server import ServedModels
from mayfly_server.dispatch.fleet import ServedModel

router = APIRouter()


@router.get("/v1/models", response_model=None, responses={200: {"model": ServedModels}})
async def list_models(front: FrontDep) -> dict[str, Any]:
    """Every model that is served or being loaded."""
    return {"object": "list", "data": [_model(front, model) for model in front.fleet.models()]}


@router.get("/v1/models/{name:path}", response_model=None, responses={200: {"model": Shown}})
async def get_model(name: str, front: FrontDep) -> dict[str, Any]:
    """One model, by any name that a request may call it."""
    return _model(front, await front.model(name))


def _model(front: Front, model: ServedModel) -> dict[str, Any]:
    """``max_model_len`` is the context in tokens, null until the model is loaded."""
    return {
        "id": model.name,
        "object": "model",
        "created": front.started,
        "owned_by": "mayfly",
        "max_model_len": model.card.context or None if model.card else None,
    }
