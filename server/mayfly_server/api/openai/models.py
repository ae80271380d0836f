"""The routes of ``/v1/models``, and of embeddings and reranking, which this server does not serve
and answers with 404."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field

from mayfly_protocol.capabilities import shown
from mayfly_server.api.dependencies import Front, FrontDep
from mayfly_server.api.openapi import AnswerObject, ModelCapabilities
from mayfly_server.dispatch.fleet import ServedModel
from mayfly_server.errors import NotServed

router = APIRouter()
not_served_router = APIRouter(include_in_schema=False)


ContextLength = Annotated[
    int | None,
    Field(description="Context length in tokens; null until the model is loaded."),
]


class ModelMeta(AnswerObject):
    n_ctx: ContextLength


class ModelObject(AnswerObject):
    """A model. Its context length has the name that each kind of client looks for: vLLM's,
    OpenRouter's, Groq's, LM Studio's (two), Anthropic's and llama.cpp's."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: ContextLength
    context_length: ContextLength
    context_window: ContextLength
    max_context_length: ContextLength
    loaded_context_length: ContextLength
    max_input_tokens: ContextLength
    meta: ModelMeta
    default_parameters: Annotated[
        dict[str, float],
        Field(
            description="Sampling parameters of requests that do not name them, as the model's "
            "authors recommend; OpenAI's defaults hold for those that are absent."
        ),
    ]
    mayfly: Annotated[
        ModelCapabilities | None,
        Field(description="The model's capabilities here; null until the model is loaded."),
    ]
    type: Literal["model"]
    display_name: str
    created_at: Annotated[str, Field(description="As created, for Anthropic's clients.")]


class ModelList(AnswerObject):
    object: Literal["list"]
    data: list[ModelObject]
    has_more: Literal[False]


@router.get("/v1/models", response_model=None, responses={200: {"model": ModelList}})
async def list_models(front: FrontDep) -> ModelList:
    """Lists every model that the server's workers have loaded or are loading."""
    models = [_model(front, model) for model in front.fleet.models()]
    return {"object": "list", "data": models, "has_more": False}


@router.get("/v1/models/{name:path}", response_model=None, responses={200: {"model": ModelObject}})
async def get_model(name: str, front: FrontDep) -> ModelObject:
    """Describes one model, given its full name, an alias, or the last part of its name (after the
    last slash)."""
    return _model(front, await front.model(name))


def _model(front: Front, model: ServedModel) -> ModelObject:
    context = model.card.context or None if model.card else None
    return {
        "id": model.name,
        "object": "model",
        "created": front.started,
        "owned_by": "mayfly",
        "max_model_len": context,
        "context_length": context,
        "context_window": context,
        "max_context_length": context,
        "loaded_context_length": context,
        "max_input_tokens": context,
        "meta": {"n_ctx": context},
        "default_parameters": {
            name: int(value) if name == "top_k" else value
            for name, value in (model.card.sampling if model.card else {}).items()
        },
        "mayfly": shown(model.card) if model.card else None,
        "type": "model",
        "display_name": model.name,
        "created_at": datetime.fromtimestamp(front.started, UTC).isoformat(),
    }


def _refuse(kind: str) -> Callable[[], Coroutine[Any, Any, None]]:
    async def refuse() -> None:
        raise NotServed(f"No {kind} model is served here; see /v1/models.")

    return refuse


not_served_router.post("/v1/embeddings")(_refuse("embedding"))
for _path in ("/v1/rerank", "/v2/rerank", "/rerank"):
    not_served_router.post(_path)(_refuse("reranking"))
