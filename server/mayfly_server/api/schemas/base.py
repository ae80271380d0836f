"""What the schemas of answers have in common."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, TypeAdapter
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

REFERENCE = "#/components/schemas/{model}"


class Answer(BaseModel):
    """A field without a default is always there; nothing else ever is."""

    model_config = ConfigDict(extra="forbid")


class DocumentedAs:
    """Marks a field whose own type says little, because its value is looked at elsewhere: the
    document shows another type."""

    def __init__(self, shown: Any) -> None:
        self._shown = shown

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return handler(TypeAdapter(self._shown).core_schema)


def streamed(
    model: type[BaseModel], event: Any, example: str, *, done: bool = False
) -> dict[str, Any]:
    """A 200 that is one object, or server-sent events where ``stream`` asked for them.

    ``event`` is the type of an event's data, ``done`` says whether ``[DONE]`` is the last one.
    FastAPI keeps no definitions for what it does not know as a model: they stay with the schema,
    as ``$defs``, for :mod:`mayfly_server.api.admin.openapi`.
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
        "model": model,
        "description": "One object; with stream, server-sent events.",
        "content": {"text/event-stream": {"itemSchema": item, "example": example}},
    }
