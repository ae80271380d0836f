"""APIs that clients may look for and that no model here answers: said clearly, and at once."""

from __future__ import annotations

from fastapi import APIRouter

from mayfly_server.errors import NotServed

router = APIRouter(include_in_schema=False)

_MODELS = {
    "/v1/embeddings": "embedding",
    "/v1/rerank": "reranking",
    "/v2/rerank": "reranking",
    "/rerank": "reranking",
}


def _without(kind: str) -> None:
    async def refuse() -> None:
        raise NotServed(f"No {kind} model is served here; see /v1/models.")

    for path, of in _MODELS.items():
        if of == kind:
            router.add_api_route(path, refuse, methods=["POST"])


for _kind in sorted(set(_MODELS.values())):
    _without(_kind)


@router.api_route("/v1/responses/{id}", methods=["GET", "DELETE"])
@router.post("/v1/responses/{id}/cancel")
@router.get("/v1/responses/{id}/input_items")
async def stored_response(id: str) -> None:
    raise NotServed("Responses are not stored here.", code="response_not_found")
