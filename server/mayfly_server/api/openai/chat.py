"""The route ``POST /v1/chat/completions``: makes a generation for a worker from OpenAI's request,
and chooses the answer's form (stream or one object)."""

from __future__ import annotations

import json

from fastapi import APIRouter, Response

from mayfly_protocol.requests import ChatPrompt, Constraint, Generation, Output
from mayfly_server.api.affinity_keys import chat_key, named_key
from mayfly_server.api.answer import GenerationJob, StreamedAnswer, WholeAnswer
from mayfly_server.api.dependencies import FrontDep, TenantDep
from mayfly_server.api.openai.chat_answer import (
    CHAT_EVENTS,
    ChatBody,
    ChatChunks,
    ChatCompletion,
    ChatEvent,
)
from mayfly_server.api.openai.chat_prompt import chat_prompt
from mayfly_server.api.openai.chat_request import ChatRequest
from mayfly_server.api.openai.common_request import (
    asked_prompt_logprobs,
    ban_fields,
    constraint,
    ending,
    prompt_limit,
    usage_report,
)
from mayfly_server.api.openapi import streamed
from mayfly_server.api.request_fields import sampling
from mayfly_server.errors import InvalidRequest
from mayfly_server.http.body import StrictRoute

router = APIRouter(route_class=StrictRoute)


@router.post(
    "/v1/chat/completions",
    response_class=Response,
    responses={200: streamed(ChatCompletion, ChatEvent, CHAT_EVENTS, done=True)},
)
async def chat_completions(request: ChatRequest, front: FrontDep, tenant: TenantDep) -> Response:
    """Continues a conversation, in one piece or as a stream of server-sent events."""
    usage = usage_report(request)
    prompt = chat_prompt(request)
    output = _output(request, prompt)
    formatted = output.constraint is not None or prompt.tool_choice == "required"
    ends = ending(request, _max_tokens(request), formatted=formatted)
    model = await front.chat_model(request.model)
    generation = Generation(
        model=model.name,
        prompt=prompt,
        sampling=ban_fields(request, sampling(request), formatted=formatted),
        ending=ends,
        output=output,
        n=request.n or 1,
        prompt_limit=prompt_limit(request),
    )
    cache_key = request.prompt_cache_key
    key = chat_key(prompt.messages) if cache_key is None else named_key(cache_key)
    job = GenerationJob(front, [generation], prefix="chatcmpl-", key=key, tenant=tenant)
    logprobs = bool(request.logprobs)
    if request.stream:
        return StreamedAnswer(
            job,
            lambda head: ChatChunks(head, logprobs=logprobs, usage=usage, ids=output.prompt_ids),
        )
    scored = output.prompt_logprobs is not None
    return WholeAnswer(
        job,
        lambda head: ChatBody(
            head, n=generation.n, logprobs=logprobs, scored=scored, ids=output.prompt_ids
        ),
    )


def _output(request: ChatRequest, prompt: ChatPrompt) -> Output:
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs.", param="top_logprobs")
    format = constraint(request, response_format(request))
    if format is not None and prompt.tool_choice == "required":
        raise InvalidRequest(
            "A tool that has to be called and an output format exclude each other.",
            param="tool_choice",
        )
    return Output(
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        split=True,
        constraint=format,
        early_calls=bool(request.stream),
        special_tokens=request.skip_special_tokens is False,
        prompt_ids=bool(request.return_token_ids),
        prompt_logprobs=asked_prompt_logprobs(request),
    )


def _max_tokens(request: ChatRequest) -> int | None:
    newer, older = request.max_completion_tokens, request.max_tokens
    if newer is not None and older is not None and newer != older:
        raise InvalidRequest(
            "max_tokens and max_completion_tokens differ.", param="max_completion_tokens"
        )
    return older if newer is None else newer


def response_format(request: ChatRequest) -> Constraint | None:
    asked = request.response_format
    if asked is None:
        return None
    if asked.json_schema is not None and asked.type != "json_schema":
        raise InvalidRequest(
            "response_format.json_schema: A schema goes with type json_schema.",
            param="response_format.json_schema",
        )
    if asked.type == "text":
        return None
    if asked.type == "json_object":
        return Constraint("json_object")
    if asked.json_schema is None:
        raise InvalidRequest(
            "response_format.json_schema: Field required.",
            param="response_format.json_schema",
            code="missing_required_parameter",
        )
    schema = asked.json_schema.schema_
    if schema is None:
        raise InvalidRequest(
            "response_format.json_schema.schema: Field required; for any JSON object, use type "
            "json_object, and for any JSON value, the schema {}.",
            param="response_format.json_schema.schema",
            code="missing_required_parameter",
        )
    return Constraint("json_schema", json.dumps(schema))
