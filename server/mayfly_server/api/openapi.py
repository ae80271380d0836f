"""The server's OpenAPI document: FastAPI's own, completed with the API keys and the events of
streams; and the classes with which routes describe their answers.

The JSON objects of answers are typed dictionaries: the code that sends an answer builds such a
dictionary, mypy checks its fields, and pydantic derives the document's schema from the same class.
The tests validate answers against the document; the running server does not.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, get_type_hints

from fastapi import FastAPI
from pydantic import ConfigDict, Field, GetJsonSchemaHandler, TypeAdapter, with_config
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema
from typing_extensions import TypedDict

from mayfly_protocol import capabilities
from mayfly_server.errors import ErrorAnswer
from mayfly_server.http.auth import PROBES
from mayfly_server.http.errors import AnthropicErrorAnswer

DESCRIPTION = """\
MLX language models, over the APIs of OpenAI (chat completions, completions, responses) and
Anthropic (messages).

Where API keys are configured, every request needs a key (`Authorization: Bearer KEY` or
`x-api-key: KEY`), except health probes. The answer has the request's `x-request-id`, or a random
one. Streams are server-sent events; comments in a stream keep the connection alive.

An unknown field at the top of a request's body is ignored; unless the field is null or empty, the
answer's header `mayfly-ignored` names it, and a server with `strict_fields` refuses it. Unknown
fields within objects are refused, except null or empty ones and hints such as `cache_control`.
"""

REFERENCE = "#/components/schemas/{model}"


@with_config(ConfigDict(extra="forbid"))
class AnswerObject(TypedDict):
    """Base class of every JSON object in an answer: an object has the fields of its class and no
    others."""


# One field for each capability of a model.
ModelCapabilities: Any = with_config(ConfigDict(extra="forbid"))(
    TypedDict(  # type: ignore[operator]
        "ModelCapabilities",
        {
            name: Annotated[kind, Field(description=capabilities.HELP[name])]
            for name, kind in get_type_hints(capabilities.Capabilities).items()
        },
    )
)


class DocumentedAs:
    """Annotates a request field with the type that the OpenAPI document shows in place of the
    field's own; for a field declared loosely (a dictionary) because other code checks its value."""

    def __init__(self, shown: Any) -> None:
        self._shown = shown

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return handler(TypeAdapter(self._shown).core_schema)


def streamed(answer: Any, event: Any, example: str, *, done: bool = False) -> dict[str, Any]:
    """The OpenAPI description of a 200 answer that is one JSON object, or server-sent events if the
    request has ``stream``.

    ``answer`` is the type of the object, ``event`` the type of an event's data, and ``example`` the
    text of a stream; ``done`` says that the last event is ``[DONE]``. FastAPI does not collect the
    definitions that ``event`` refers to: they stay in its schema as ``$defs`` until
    :func:`install` moves them to the document's components.
    """
    data: dict[str, Any] = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": TypeAdapter(event).json_schema(ref_template=REFERENCE),
    }
    properties = {
        "event": {"type": "string"},
        "data": {"anyOf": [data, {"const": "[DONE]"}]} if done else data,
    }
    item = {"type": "object", "properties": properties, "required": ["data"]}
    return {
        "model": answer,
        "description": "One object; with stream, server-sent events.",
        "content": {"text/event-stream": {"itemSchema": item, "example": example}},
    }


_RETRY_HEADERS = {
    "x-should-retry": {
        "description": "Whether another try can succeed; sent with status 408, 429 and 5xx.",
        "schema": {"enum": ["true", "false"]},
    },
    "retry-after": {
        "description": "Seconds to wait before another try; absent if not known.",
        "schema": {"type": "integer", "minimum": 1},
    },
}


def _failures(model: Any) -> dict[int | str, dict[str, Any]]:
    answer = {"model": model, "headers": _RETRY_HEADERS}
    return {
        "4XX": {**answer, "description": "The request is at fault, or comes too often."},
        "5XX": {**answer, "description": "The server cannot answer the request, or not now."},
    }


FAILURES = _failures(ErrorAnswer)
ANTHROPIC_FAILURES = _failures(AnthropicErrorAnswer)


def package_version() -> str:
    """The installed distribution's version; "0" in a source tree that is not installed."""
    try:
        return version("mlx-mayfly")
    except PackageNotFoundError:
        return "0"


def install(app: FastAPI, *, locked: bool, strict_fields: bool) -> None:
    """Makes the application's OpenAPI document include the API keys (required if the server is
    ``locked``, else optional) and the schemas of events in streams, and lets bodies have unknown
    fields unless ``strict_fields`` is set."""
    fastapi_document = app.openapi

    def document() -> dict[str, Any]:
        complete = app.openapi_schema is not None
        found = fastapi_document()
        if not complete:
            _add_keys(found, locked=locked)
            _move_event_definitions(found)
            if not strict_fields:
                _allow_unknown_fields(found)
        return found

    app.openapi = document  # type: ignore[method-assign]


def _add_keys(document: dict[str, Any], *, locked: bool) -> None:
    document["components"]["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    document["security"] = [{"bearer": []}, {"header": []}, *([] if locked else [{}])]
    for probe in PROBES:
        document["paths"][probe]["get"]["security"] = []


def _allow_unknown_fields(document: dict[str, Any]) -> None:
    """Lets the bodies of requests have fields that are not listed, since the server ignores
    them."""
    for operations in document["paths"].values():
        for operation in operations.values():
            if "requestBody" in operation:
                body = operation["requestBody"]["content"]["application/json"]["schema"]
                name = body["$ref"].rpartition("/")[2]
                del document["components"]["schemas"][name]["additionalProperties"]


def _move_event_definitions(document: dict[str, Any]) -> None:
    """Moves the schema definitions that :func:`streamed` left in the routes' descriptions to the
    OpenAPI document's components."""
    schemas = document["components"]["schemas"]
    for operations in document["paths"].values():
        for operation in operations.values():
            content = operation["responses"]["200"]["content"]
            _move_definitions(content.get("text/event-stream", {}), schemas)


def _move_definitions(node: Any, schemas: dict[str, Any]) -> None:
    if isinstance(node, list):
        for inner in node:
            _move_definitions(inner, schemas)
    if isinstance(node, dict):
        for name, definition in node.pop("$defs", {}).items():
            schemas.setdefault(name, definition)
        _move_definitions(list(node.values()), schemas)
