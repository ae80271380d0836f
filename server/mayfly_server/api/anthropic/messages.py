"""The routes ``POST /v1/messages`` and ``POST /v1/messages/count_tokens`` of Anthropic's API."""

from __future__ import annotations

import json
from functools import partial

from fastapi import APIRouter, Request, Response

from mayfly_protocol.requests import ChatPrompt, Constraint, Ending, Generation, Output
from mayfly_protocol.serving import Tokenize, Tokenized
from mayfly_server.api.affinity_keys import chat_key
from mayfly_server.api.answer import GenerationJob, StreamedAnswer, WholeAnswer
from mayfly_server.api.anthropic.messages_answer import (
    MESSAGE_EVENTS,
    MessageAnswer,
    MessageBody,
    MessageEvent,
    MessageEvents,
)
from mayfly_server.api.anthropic.messages_prompt import chat_prompt
from mayfly_server.api.anthropic.messages_request import (
    CountTokensRequest,
    MessagesRequest,
    PromptFields,
)
from mayfly_server.api.dependencies import FrontDep, TenantDep
from mayfly_server.api.openapi import AnswerObject, streamed
from mayfly_server.api.request_fields import sampling
from mayfly_server.dispatch.tokenize import ask_worker
from mayfly_server.errors import InvalidRequest
from mayfly_server.http.body import StrictRoute
from mayfly_server.http.errors import request_id

router = APIRouter(route_class=StrictRoute)


class TokenCount(AnswerObject):
    input_tokens: int


@router.post(
    "/v1/messages",
    response_class=Response,
    responses={200: streamed(MessageAnswer, MessageEvent, MESSAGE_EVENTS)},
)
async def messages(
    request: MessagesRequest, front: FrontDep, tenant: TenantDep, http: Request
) -> Response:
    """Continues a conversation, in Anthropic's format: in one piece or as a stream of events."""
    prompt = chat_prompt(request)
    output = Output(
        split=True,
        constraint=_constraint(request, prompt),
        early_calls=bool(request.stream),
    )
    model = await front.chat_model(request.model)
    generation = Generation(
        model=model.name,
        prompt=prompt,
        sampling=sampling(request),
        ending=Ending(max_tokens=request.max_tokens, stop=tuple(request.stop_sequences or ())),
        output=output,
    )
    job = GenerationJob(
        front, [generation], prefix="msg_", key=chat_key(prompt.messages), tenant=tenant
    )
    thoughts = not (request.thinking and request.thinking.display == "omitted")
    if request.stream:
        id = request_id(http.scope)
        events = partial(MessageEvents, thoughts=thoughts, request_id=id)
        return StreamedAnswer(job, events)
    return WholeAnswer(job, partial(MessageBody, thoughts=thoughts))


@router.post(
    "/v1/messages/count_tokens", response_model=None, responses={200: {"model": TokenCount}}
)
async def count_tokens(request: CountTokensRequest, front: FrontDep) -> TokenCount:
    """Counts the prompt tokens that a request with this body to ``/v1/messages`` would have."""
    prompt = chat_prompt(request)
    _constraint(request, prompt)
    model = await front.chat_model(request.model)
    question = partial(Tokenize, prompt=prompt, count_only=True)
    found = await ask_worker(front.fleet, front.settings, model.name, question)
    assert isinstance(found, Tokenized)
    return {"input_tokens": found.count}


def _constraint(request: PromptFields, prompt: ChatPrompt) -> Constraint | None:
    format = request.output_config.format if request.output_config else None
    if format is not None and request.output_format is not None:
        raise InvalidRequest(
            "output_format and output_config.format exclude each other.", param="output_format"
        )
    format = format or request.output_format
    if format is None:
        return None
    if prompt.tool_choice == "required":
        raise InvalidRequest(
            "A tool that has to be called and an output format exclude each other.",
            param="tool_choice",
        )
    return Constraint("json_schema", json.dumps(format.schema_))
