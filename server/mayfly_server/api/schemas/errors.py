"""Errors, in the shapes of OpenAI's API and of Anthropic's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from mayfly_server.api.schemas.base import Answer


class ErrorObject(Answer):
    message: Annotated[str, Field(examples=["temperature: Input should be a valid number."])]
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: Annotated[str | None, Field(description="The field it is about.", examples=["stop"])]
    code: Annotated[str | None, Field(description="For programs.", examples=["model_not_found"])]
    retryable: Annotated[bool, Field(description="Whether another try can succeed.")]


class ErrorAnswer(Answer):
    error: ErrorObject


class AnthropicErrorDetails(Answer):
    error_code: str


class AnthropicErrorObject(Answer):
    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "not_found_error",
        "timeout_error",
        "rate_limit_error",
        "overloaded_error",
        "api_error",
    ]
    message: str
    details: AnthropicErrorDetails | None = None


class AnthropicErrorAnswer(Answer):
    type: Literal["error"]
    error: AnthropicErrorObject
    request_id: str


_RETRIES = {
    "x-should-retry": {
        "description": "Whether another try can succeed: with 408, 429 and 5xx.",
        "schema": {"enum": ["true", "false"]},
    },
    "retry-after": {
        "description": "Seconds to wait before that, where they are known.",
        "schema": {"type": "integer", "minimum": 1},
    },
}


def _failures(model: type[Answer]) -> dict[int | str, dict[str, Any]]:
    answer = {"model": model, "headers": _RETRIES}
    return {
        "4XX": {**answer, "description": "The request cannot be answered as it is."},
        "5XX": {**answer, "description": "The server cannot answer it, or not now."},
    }


FAILURES = _failures(ErrorAnswer)
ANTHROPIC_FAILURES = _failures(AnthropicErrorAnswer)
