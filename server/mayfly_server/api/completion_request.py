"""What ``POST /v1/completions`` takes."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from mayfly_protocol.requests import TextPrompt, TokenPrompt
from mayfly_server.api.fields import (
    MAX_CHOICES,
    MAX_COUNT,
    CommonFields,
)

Prompts = list[TextPrompt | TokenPrompt]
_FORMS = "a string, a list of strings, a list of token ids, or a list of such lists"


def _prompts(value: Any) -> Prompts:
    """Any of the four forms as a list of prompts."""
    if isinstance(value, str):
        return [TextPrompt(value)]
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("prompt", f"Input should be {_FORMS}, and not empty")
    if _are_token_ids(value):
        return [TokenPrompt(tuple(value))]
    if len(value) > MAX_CHOICES:
        raise PydanticCustomError("prompt", f"At most {MAX_CHOICES} prompts can be sent at once")
    if all(isinstance(item, str) for item in value):
        return [TextPrompt(item) for item in value]
    if all(isinstance(item, list) and _are_token_ids(item) for item in value):
        return [TokenPrompt(tuple(item)) for item in value]
    raise PydanticCustomError("prompt", f"Input should be {_FORMS}; no mixture, and none empty")


def _are_token_ids(items: list[Any]) -> bool:
    return bool(items) and all(type(item) is int and 0 <= item <= MAX_COUNT for item in items)


def _no_suffix(value: Any) -> None:
    if value not in (None, ""):
        raise PydanticCustomError("unsupported", "This is not supported by this server")


class CompletionRequest(CommonFields):
    """See the module."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"prompt": "Once upon a time", "max_tokens": 32, "temperature": 0.8, "seed": 7},
            ]
        }
    )

    prompt: Annotated[
        Any,
        AfterValidator(_prompts),
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "items": {"type": "string"}, "minItems": 1},
                    {"type": "array", "items": {"type": "integer"}, "minItems": 1},
                    {
                        "type": "array",
                        "items": {"type": "array", "items": {"type": "integer"}, "minItems": 1},
                        "minItems": 1,
                    },
                ]
            }
        ),
    ]
    max_tokens: Annotated[int, Field(ge=0, description="0 only with echo.")] | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    suffix: Annotated[None, BeforeValidator(_no_suffix)] = None
