"""The routes of ``/v1/models``, and of embeddings and reranking, which this server does not serve
and answers with 404."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field

from mayfly_server.api.dependencies import Front, FrontDep
from mayfly_server.api.openapi import AnswerObject
from mayfly_server.dispatch.fleet import ServedModel
from mayfly_server.errors import NotServed

router = APIRouter()
not_served_router = APIRouter(include_in_schema=False)


class ModelObject(AnswerObject):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: Annotated[
        int | None,
        Field(description="Context length in tokens; null until the model is loaded."),
    ]


class ModelList(AnswerObject):
    object: Literal["list"]
    data: list[ModelObject]


@router.get("/v1/models", response_model=None, responses={200: {"model": ModelList}})
async def list_models(front: FrontDep) -> ModelList:
    """Lists every model that the server's workers have loaded or are loading."""
    return {"object": "list", "data": [_model(front, model) for model in front.fleet.models()]}


@router.get("/v1/models/{name:path}", response_model=None, responses={200: {"model": ModelObject}})
async def get_model(name: str, front: FrontDep) -> ModelObject:
    """Describes one model, given its full name, an alias, or the last part of its name (after the
    last slash)."""
    return _model(front, await front.model(name))


def _model(front: Front, model: ServedModel) -> ModelObject:
    return {
        "id": model.name,
        "object": "model",
        "created": front.started,
        "owned_by": "mayfly",
        "max_model_len": model.card.context or None if model.card else None,
    }


def _refuse(kind: str) -> Callable[[], Coroutine[Any, Any, None]]:
    async def refuse() -> None:
        raise NotServed(f"No {kind} model is served here; see /v1/models.")

    return refuse


not_served_router.post("/v1/embeddings")(_refuse("embedding"))
for _path in ("/v1/rerank", "/v2/rerank", "/rerank"):
    not_served_router.post(_path)(_refuse("reranking"))
