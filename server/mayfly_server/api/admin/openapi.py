"""The OpenAPI document of an application, as FastAPI makes it, and what FastAPI does not know.

APIs that clients may look for and that no model here answers: said clearly, and at once.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import APIRouter, FastAPI

from mayfly_server.errors import NotServed
from mayfly_server.http.auth import PROBES

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


DESCRIPTION = """\
MLX language models, over the APIs of OpenAI (chat completions, completions, responses) and
Anthropic (messages).

Where API keys are configured, every request needs one (`Authorization: Bearer KEY` or
`x-api-key: KEY`), but for the probes. An `x-request-id` that a request carries comes back with the
answer; otherwise one is drawn. Streams are server-sent events; comments in them keep the connection
alive.
"""


def package_version() -> str:
    try:
        return version("mlx-mayfly")
    except PackageNotFoundError:  # from a source tree
        return "0"


def install(app: FastAPI, *, locked: bool) -> None:
    """Adds what a caller has to send, keys where the server is ``locked``, and what events are
    made of."""
    make = app.openapi

    def document() -> dict[str, Any]:
        known = app.openapi_schema is not None
        made = make()
        if not known:
            _add_keys(made, locked=locked)
            _add_events(made)
        return made

    app.openapi = document  # type: ignore[method-assign]


def _add_keys(document: dict[str, Any], *, locked: bool) -> None:
    document["components"]["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    document["security"] = [{"bearer": []}, {"header": []}, *([] if locked else [{}])]
    for probe in PROBES:
        document["paths"][probe]["get"]["security"] = []


def _add_events(document: dict[str, Any]) -> None:
    """Moves the definitions that events came with to where they are looked for."""
    known = document["components"]["schemas"]
    for operations in document["paths"].values():
        for operation in operations.values():
            content = operation["responses"]["200"]["content"]
            _move_definitions(content.get("text/event-stream", {}), known)


def _move_definitions(node: Any, known: dict[str, Any]) -> None:
    if isinstance(node, list):
        for inner in node:
            _move_definitions(inner, known)
    if isinstance(node, dict):
        for name, definition in node.pop("$defs", {}).items():
            known.setdefault(name, definition)
        _move_definitions(list(node.values()), known)
