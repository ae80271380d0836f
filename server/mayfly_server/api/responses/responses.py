"""The route ``POST /v1/responses``, and OpenAI's routes of stored responses, which answer 404
because the server stores no responses."""

from __future__ import annotations

import json
from functools import partial
from typing import Any, Literal

from fastapi import APIRouter, Request, Response

from mayfly_protocol.requests import ChatPrompt, Constraint, Ending, Generation, Output
from mayfly_protocol.serving import Tokenize, Tokenized
from mayfly_server.api.affinity_keys import chat_key, named_key
from mayfly_server.api.answer import GenerationJob, StreamedAnswer, WholeAnswer
from mayfly_server.api.dependencies import Front, FrontDep, TenantDep
from mayfly_server.api.openapi import AnswerObject, streamed
from mayfly_server.api.request_fields import sampling
from mayfly_server.api.responses.responses_answer import ResponseBody, ResponseEvents
from mayfly_server.api.responses.responses_objects import (
    RESPONSES_EVENTS,
    RequestEcho,
    ResponseAnswer,
    ResponsesEvent,
)
from mayfly_server.api.responses.responses_prompt import prompt_limit, read_prompt, shortened
from mayfly_server.api.responses.responses_request import (
    INCLUDES,
    LOGPROBS,
    InputTokensRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    PromptFields,
    ResponsesRequest,
)
from mayfly_server.api.responses.responses_tools import HOSTED, ToolNames
from mayfly_server.dispatch.tokenize import ask_worker
from mayfly_server.errors import InvalidRequest, NotServed
from mayfly_server.http.body import StrictRoute
from mayfly_server.http.ignored_fields import note_ignored

router = APIRouter(route_class=StrictRoute)
not_stored_router = APIRouter(include_in_schema=False)


class InputTokens(AnswerObject):
    object: Literal["response.input_tokens"]
    input_tokens: int


@router.post(
    "/v1/responses",
    response_class=Response,
    responses={200: streamed(ResponseAnswer, ResponsesEvent, RESPONSES_EVENTS)},
)
async def responses(
    request: ResponsesRequest, front: FrontDep, tenant: TenantDep, http: Request
) -> Response:
    """Answers a conversation, given as a list of items (messages, reasoning, calls of tools), with
    new items, in one piece or as a stream of events."""
    read = read_prompt(request)
    _note_unknown(request, read.tools, front, http)
    included = frozenset(request.include or ())
    output = _output(request, read.prompt, logprobs=LOGPROBS in included)
    options = request.stream_options
    if options is not None and options.include_obfuscation is not None and not request.stream:
        raise InvalidRequest(
            "stream_options can only be given with stream.", param="stream_options"
        )
    model = await front.chat_model(request.model)
    prompt = read.prompt
    if request.truncation == "auto" and model.card is not None and model.card.context:
        limit = prompt_limit(model.card.context, request.max_output_tokens)
        prompt = await shortened(prompt, limit, partial(_count, front, model.name))
    generation = Generation(
        model=model.name,
        prompt=prompt,
        sampling=sampling(request),
        ending=Ending(max_tokens=request.max_output_tokens),
        output=output,
    )
    name = request.prompt_cache_key
    key = chat_key(read.prompt.messages) if name is None else named_key(name)
    job = GenerationJob(front, [generation], prefix="resp_", key=key, tenant=tenant)
    echoed = _request_echo(request, model.card.sampling if model.card else {})
    if request.stream:
        events = partial(ResponseEvents, echoed=echoed, tools=read.tools, included=included)
        return StreamedAnswer(job, events)
    body = partial(ResponseBody, echoed=echoed, tools=read.tools, included=included)
    return WholeAnswer(job, body)


@router.post(
    "/v1/responses/input_tokens", response_model=None, responses={200: {"model": InputTokens}}
)
async def input_tokens(request: InputTokensRequest, front: FrontDep, http: Request) -> InputTokens:
    """Counts the prompt tokens that a request with this body to ``/v1/responses`` would have."""
    read = read_prompt(request)
    _note_unknown(request, read.tools, front, http)
    _constraint(request, read.prompt)
    model = await front.chat_model(request.model)
    count = await _count(front, model.name, read.prompt)
    return {"object": "response.input_tokens", "input_tokens": count}


async def _count(front: Front, model: str, prompt: ChatPrompt) -> int:
    question = partial(Tokenize, prompt=prompt, count_only=True)
    found = await ask_worker(front.fleet, front.settings, model, question)
    assert isinstance(found, Tokenized)
    return found.count


def _note_unknown(request: PromptFields, tools: ToolNames, front: Front, http: Request) -> None:
    """Notes, as fields that are ignored, tools of unknown types and unknown things to include; or
    refuses them, if the server is strict about fields."""
    included = request.include or () if isinstance(request, ResponsesRequest) else ()
    for field, values, known in (("tools", tools.hosted, HOSTED), ("include", included, INCLUDES)):
        if set(values) <= known:
            continue
        if front.settings.strict_fields:
            raise InvalidRequest(f"{field}: One of these is not known.", param=field)
        note_ignored(field, http.scope, front.ignored_fields)


def _output(request: ResponsesRequest, prompt: ChatPrompt, *, logprobs: bool) -> Output:
    if request.top_logprobs and not logprobs:
        raise InvalidRequest(
            f"top_logprobs goes with include: [{LOGPROBS!r}].", param="top_logprobs"
        )
    return Output(
        logprobs=(request.top_logprobs or 0) if logprobs else None,
        split=True,
        constraint=_constraint(request, prompt),
        early_calls=bool(request.stream),
    )


def _constraint(request: PromptFields, prompt: ChatPrompt) -> Constraint | None:
    match request.text.format if request.text else None:
        case JsonObjectFormat():
            found = Constraint("json_object", param="text.format")
        case JsonSchemaFormat(schema_=schema):
            found = Constraint("json_schema", json.dumps(schema), "text.format.schema")
        case _:
            return None
    if prompt.tool_choice == "required":
        raise InvalidRequest(
            "A tool that has to be called and an output format exclude each other.",
            param="tool_choice",
        )
    return found


def _request_echo(request: ResponsesRequest, recommended: dict[str, float]) -> RequestEcho:
    """The fields of the request that the response repeats, with defaults; ``recommended`` are the
    model's own defaults of sampling parameters."""
    named = {"temperature": request.temperature, "top_p": request.top_p}
    drawn = {"temperature": 1.0, "top_p": 1.0} | recommended
    drawn |= {name: value for name, value in named.items() if value is not None}
    fields: Any = request.model_dump(by_alias=True)
    text: Any = fields["text"] or {}
    format: Any = text.get("format") or {"type": "text"}
    return {
        "background": False,
        "conversation": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": {
            name: value if isinstance(value, str) else json.dumps(value)
            for name, value in (request.metadata or {}).items()
        },
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {
            "effort": request.reasoning.effort if request.reasoning else None,
            "summary": (
                request.reasoning.summary or request.reasoning.generate_summary
                if request.reasoning
                else None
            ),
        },
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": drawn["temperature"],
        "text": {
            "format": format,
            "verbosity": text.get("verbosity") or "medium",
        },
        "tool_choice": fields["tool_choice"] or "auto",
        "tools": fields["tools"] or [],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": drawn["top_p"],
        "truncation": request.truncation or "disabled",
        "user": request.user,
    }


@not_stored_router.api_route("/v1/responses/{id}", methods=["GET", "DELETE"])
@not_stored_router.post("/v1/responses/{id}/cancel")
@not_stored_router.get("/v1/responses/{id}/input_items")
async def stored_response(id: str) -> None:
    raise NotServed(
        "Responses are not stored here, so that none can be read, deleted or cancelled by its id; "
        "send the whole conversation with each request.",
        code="response_not_found",
    )


@not_stored_router.post("/v1/responses/compact")
async def compact() -> None:
    raise NotServed(
        "Conversations are not compacted here; ask for a summary with /v1/responses instead."
    )
