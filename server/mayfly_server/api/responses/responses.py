"""The route ``POST /v1/responses``, and OpenAI's routes of stored responses, which answer 404
because the server stores no responses."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from fastapi import APIRouter, Response

from mayfly_protocol.requests import ChatPrompt, Constraint, Ending, Generation, Output
from mayfly_server.api.affinity_keys import chat_key, named_key
from mayfly_server.api.answer import GenerationJob, StreamedAnswer, WholeAnswer
from mayfly_server.api.dependencies import FrontDep, TenantDep
from mayfly_server.api.openapi import streamed
from mayfly_server.api.request_fields import SamplingFields, sampling
from mayfly_server.api.responses.responses_answer import ResponseBody, ResponseEvents
from mayfly_server.api.responses.responses_objects import (
    RESPONSES_EVENTS,
    RequestEcho,
    ResponseAnswer,
    ResponsesEvent,
)
from mayfly_server.api.responses.responses_prompt import chat_prompt
from mayfly_server.api.responses.responses_request import (
    JsonObjectFormat,
    JsonSchemaFormat,
    ResponsesRequest,
)
from mayfly_server.errors import InvalidRequest, NotServed
from mayfly_server.http.body import StrictRoute

router = APIRouter(route_class=StrictRoute)
not_stored_router = APIRouter(include_in_schema=False)

_LOGPROBS = "message.output_text.logprobs"


@router.post(
    "/v1/responses",
    response_class=Response,
    responses={200: streamed(ResponseAnswer, ResponsesEvent, RESPONSES_EVENTS)},
)
async def responses(request: ResponsesRequest, front: FrontDep, tenant: TenantDep) -> Response:
    """Answers a conversation, given as a list of items (messages, reasoning, function calls), with
    new items, in one piece or as a stream of events."""
    prompt = chat_prompt(request)
    logprobs = _LOGPROBS in (request.include or ())
    output = _output(request, prompt, logprobs=logprobs)
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest(
            "stream_options can only be given with stream.", param="stream_options"
        )
    model = await front.chat_model(request.model)
    generation = Generation(
        model=model.name,
        prompt=prompt,
        sampling=sampling(SamplingFields(temperature=request.temperature, top_p=request.top_p)),
        ending=Ending(max_tokens=request.max_output_tokens),
        output=output,
    )
    name = request.prompt_cache_key
    key = chat_key(prompt.messages) if name is None else named_key(name)
    job = GenerationJob(front, [generation], prefix="resp_", key=key, tenant=tenant)
    echoed = _request_echo(request)
    if request.stream:
        events = partial(ResponseEvents, echoed=echoed, logprobs=logprobs)
        return StreamedAnswer(job, events)
    body = partial(ResponseBody, echoed=echoed, logprobs=logprobs)
    return WholeAnswer(job, body)


def _output(request: ResponsesRequest, prompt: ChatPrompt, *, logprobs: bool) -> Output:
    if request.top_logprobs and not logprobs:
        raise InvalidRequest(
            f"top_logprobs goes with include: [{_LOGPROBS!r}].", param="top_logprobs"
        )
    constraint = _constraint(request)
    if constraint is not None and prompt.tool_choice == "required":
        raise InvalidRequest(
            "A tool that has to be called and an output format exclude each other.",
            param="tool_choice",
        )
    return Output(
        logprobs=(request.top_logprobs or 0) if logprobs else None,
        split=True,
        constraint=constraint,
        early_calls=bool(request.stream),
    )


def _constraint(request: ResponsesRequest) -> Constraint | None:
    match request.text.format if request.text else None:
        case JsonObjectFormat():
            return Constraint("json_object", param="text.format")
        case JsonSchemaFormat(schema_=schema):
            return Constraint("json_schema", json.dumps(schema), "text.format.schema")
        case _:
            return None


def _request_echo(request: ResponsesRequest) -> RequestEcho:
    fields: Any = request.model_dump(by_alias=True)
    text: Any = fields["text"] or {}
    format: Any = text.get("format") or {"type": "text"}
    return {
        "background": False,
        "conversation": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": None,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {
            "effort": request.reasoning.effort if request.reasoning else None,
            "summary": request.reasoning.summary if request.reasoning else None,
        },
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": {
            "format": format,
            "verbosity": text.get("verbosity") or "medium",
        },
        "tool_choice": fields["tool_choice"] or "auto",
        "tools": fields["tools"] or [],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": "disabled",
        "user": request.user,
    }


@not_stored_router.api_route("/v1/responses/{id}", methods=["GET", "DELETE"])
@not_stored_router.post("/v1/responses/{id}/cancel")
@not_stored_router.get("/v1/responses/{id}/input_items")
async def stored_response(id: str) -> None:
    raise NotServed("Responses are not stored here.", code="response_not_found")
