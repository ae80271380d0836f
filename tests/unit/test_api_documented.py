"""Every parameter that the released clients can send is known: used, or refused as not supported,
and never taken for a misspelling."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic.types import beta, message_count_tokens_params, message_create_params
from openai.types import chat, completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import input_token_count_params, response_create_params
from pydantic import BaseModel

from mayfly_server.api.anthropic.messages_request import CountTokensRequest, MessagesRequest
from mayfly_server.api.openai.chat_prompt import read_messages
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


ROLES = {
    "system": chat.ChatCompletionSystemMessageParam,
    "developer": chat.ChatCompletionDeveloperMessageParam,
    "user": chat.ChatCompletionUserMessageParam,
    "tool": chat.ChatCompletionToolMessageParam,
    "assistant": chat.ChatCompletionAssistantMessageParam,
}


@pytest.mark.parametrize("role", ROLES)
def test_N07_every_documented_field_of_a_message_may_be_null(role: str) -> None:
    documented = set(ROLES[role].__annotations__)
    if role == "assistant":
        documented |= chat.ParsedChatCompletionMessage.model_fields.keys()
    assert {"role", "content"} < documented
    nulls = dict.fromkeys(documented - {"role", "content"})
    part = chat.ChatCompletionContentPartTextParam.__annotations__
    text = {**dict.fromkeys(part), "type": "text", "text": "hi"}
    (made,) = read_messages([{"role": role, "content": [text], **nulls}])
    assert made == {"role": "system" if role == "developer" else role, "content": "hi"}


def test_N07_an_answer_of_parse_comes_back_as_it_is() -> None:
    function = {"name": "f", "arguments": "{}", "parsed_arguments": {}}
    call = {"id": "c", "type": "function", "function": function}
    answer = {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]}
    message = chat.ParsedChatCompletionMessage[Any].model_validate(answer | {"parsed": None})
    sent = {**message.model_dump(), "reasoning_details": [], "images": []}
    (made,) = read_messages([sent])
    assert made["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}
