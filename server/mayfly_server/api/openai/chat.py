"""``POST /v1/chat/completions``."""

from __future__ import annotations

from datetime import date
from typing import Any

from fastapi import APIRouter, Response

from mayfly_protocol.requests import ChatPrompt, Generation, Output
from mayfly_server.api import parameters
from mayfly_server.api.answer import GenerationJob, StreamedAnswer, WholeAnswer
from mayfly_server.api.dependencies import FrontDep, TenantDep
from mayfly_server.api.openai.chat_answer import ChatBody, ChatChunks
from mayfly_server.api.openai.chat_request import ChatRequest, Tool, ToolChoice
from mayfly_server.api.openai.messages import conversation
from mayfly_server.api.parameters import chat_key, named_key
from mayfly_server.api.schemas.base import streamed
from mayfly_server.api.schemas.completions import CHAT_EVENTS, ChatCompletion, ChatEvent
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
    usage = parameters.usage_told(request)
    prompt = chat_prompt(request)
    output = _output(request, prompt)
    formatted = output.constraint is not None or prompt.tool_choice == "required"
    ending = parameters.ending(request, _max_tokens(request), formatted=formatted)
    model = await front.chat_model(request.model)
    generation = Generation(
        model=model.name,
        prompt=prompt,
        sampling=parameters.sampling(request),
        ending=ending,
        output=output,
        n=request.n or 1,
    )
    cache_key = request.prompt_cache_key
    key = chat_key(prompt.messages) if cache_key is None else named_key(cache_key)
    job = GenerationJob(front, [generation], prefix="chatcmpl-", key=key, tenant=tenant)
    logprobs = bool(request.logprobs)
    if request.stream:
        return StreamedAnswer(
            job,
            lambda head: ChatChunks(head, logprobs=logprobs, usage=usage),
        )
    return WholeAnswer(job, lambda head: ChatBody(head, n=generation.n, logprobs=logprobs))


def chat_prompt(request: ChatRequest) -> ChatPrompt:
    """Raises InvalidRequest for messages and tools that do not fit together."""
    choice = _tool_choice(request)
    continue_final = bool(request.continue_final_message)
    add_prompt = request.add_generation_prompt
    if continue_final and add_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other.",
            param="continue_final_message",
        )
    return ChatPrompt(
        messages=conversation(request.messages),
        tools=tuple(_tool_object(tool) for tool in request.tools or ()),
        tool_choice=choice.mode,
        forced_tool=choice.name,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        template_kwargs=_template_kwargs(request),
        add_generation_prompt=not continue_final if add_prompt is None else add_prompt,
        continue_final_message=continue_final,
        date=date.today().isoformat(),
    )


def _tool_choice(request: ChatRequest) -> ToolChoice:
    choice: ToolChoice = request.tool_choice or ToolChoice("auto")
    names = [tool.function.name for tool in request.tools or ()]
    if len(set(names)) < len(names):
        raise InvalidRequest("tools: two of them have the same name.", param="tools")
    if choice.mode == "required" and not names:
        raise InvalidRequest("tool_choice: there are no tools to call.", param="tool_choice")
    if choice.name is not None and choice.name not in names:
        raise InvalidRequest("tool_choice: no tool has this name.", param="tool_choice")
    return choice


def _tool_object(tool: Tool) -> dict[str, Any]:
    return tool.model_dump(exclude_none=True)


def _template_kwargs(request: ChatRequest) -> dict[str, Any]:
    kwargs = dict(request.chat_template_kwargs or {})
    effort = request.reasoning_effort
    if effort is not None:
        kwargs.setdefault("reasoning_effort", effort)
        if effort == "none":
            kwargs.setdefault("enable_thinking", False)
    return kwargs


def _output(request: ChatRequest, prompt: ChatPrompt) -> Output:
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs.", param="top_logprobs")
    constraint = parameters.constraint(request)
    if constraint is not None and prompt.tool_choice == "required":
        raise InvalidRequest(
            "A tool that has to be called and an output format exclude each other.",
            param="tool_choice",
        )
    return Output(
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        split=True,
        constraint=constraint,
    )


def _max_tokens(request: ChatRequest) -> int | None:
    newer, older = request.max_completion_tokens, request.max_tokens
    if newer is not None and older is not None and newer != older:
        raise InvalidRequest(
            "max_tokens and max_completion_tokens differ.", param="max_completion_tokens"
        )
    return older if newer is None else newer
