"""What the schemas of answers have in common."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, TypeAdapter
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema


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


def streamed(model: type[BaseModel], example: str) -> dict[str, Any]:
    """A 200 that is one object, or server-sent events where ``stream`` asked for them."""
    return {
        "model": model,
        "description": "One object; with stream, server-sent events.",
        "content": {"text/event-stream": {"example": example}},
    }
