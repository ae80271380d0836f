"""Every parameter that the released clients can send is known: used, or refused as not supported,
and never taken for a misspelling."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic.types import beta, message_count_tokens_params, message_create_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import input_token_count_params, response_create_params
from pydantic import BaseModel

from mayfly_server.api.anthropic.messages_request import CountTokensRequest, MessagesRequest
from mayfly_server.api.openai.chat_request import ChatRequest
from mayfly_server.api.openai.completions import CompletionRequest
from mayfly_server.api.responses.responses_request import (
    InputTokensRequest,
    ResponsesRequest,
)

IN_A_HEADER = {"workspace_id", "betas"}
DOCUMENTED: list[tuple[type[BaseModel], Any]] = [
    (ChatRequest, chat_create_params.CompletionCreateParamsBase),
    (CompletionRequest, completion_create_params.CompletionCreateParamsBase),
    (ResponsesRequest, response_create_params.ResponseCreateParamsBase),
    (InputTokensRequest, input_token_count_params.InputTokenCountParams),
    (MessagesRequest, message_create_params.MessageCreateParamsBase),
    (MessagesRequest, beta.message_create_params.MessageCreateParamsBase),
    (CountTokensRequest, message_count_tokens_params.MessageCountTokensParams),
    (CountTokensRequest, beta.message_count_tokens_params.MessageCountTokensParams),
]


@pytest.mark.parametrize(("request_type", "parameters"), DOCUMENTED)
def test_every_documented_parameter_is_known(
    request_type: type[BaseModel], parameters: Any
) -> None:
    documented = set(parameters.__annotations__) - IN_A_HEADER
    assert len(documented) > 5
    known = {field.alias or name for name, field in request_type.model_fields.items()}
    assert documented <= known
