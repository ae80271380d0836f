"""``POST /v1/completions``."""

from __future__ import annotations

from dataclasses import replace
from secrets import randbits

from fastapi import APIRouter, Response

from mayfly_protocol.requests import Generation, Output, Sampling
from mayfly_server.api import parameters
from mayfly_server.api.answer import StreamedAnswer, WholeAnswer
from mayfly_server.api.body import StrictRoute
from mayfly_server.api.completion_answer import CompletionBody, CompletionChunks
from mayfly_server.api.completion_request import CompletionRequest, Prompts
from mayfly_server.api.conversation import prompt_key
from mayfly_server.api.fields import MAX_CHOICES, MAX_COUNT
from mayfly_server.api.front import FrontDep, TenantDep
from mayfly_server.api.run import Run
from mayfly_server.api.schemas.base import streamed
from mayfly_server.api.schemas.completions import TEXT_EVENTS, TextCompletion, TextEvent
from mayfly_server.errors import InvalidRequest

router = APIRouter(route_class=StrictRoute)


@router.post(
    "/v1/completions",
    response_class=Response,
    responses={200: streamed(TextCompletion, TextEvent, TEXT_EVENTS, done=True)},
)
async def completions(request: CompletionRequest, front: FrontDep, tenant: TenantDep) -> Response:
    """Continues one or several prompts, in one piece or as a stream of server-sent events."""
    usage = parameters.usage_told(request)
    prompts: Prompts = request.prompt
    n = _choices(request, len(prompts))
    output = _output(request)
    formatted = output.constraint is not None
    ending = parameters.ending(request, _max_tokens(request), formatted=formatted)
    sampling = parameters.sampling(request)
    model = await front.model(request.model)
    generations = [
        Generation(
            model=model.name,
            prompt=prompt,
            sampling=_own_seed(sampling) if request.seed is None else sampling,
            ending=ending,
            output=output,
            n=n,
        )
        for prompt in prompts
    ]
    run = Run(front, generations, prefix="cmpl-", key=prompt_key(prompts[0]), tenant=tenant)
    logprobs = request.logprobs is not None
    if request.stream:
        return StreamedAnswer(
            run,
            front.metrics,
            lambda head: CompletionChunks(head, n=n, logprobs=logprobs, usage=usage),
        )
    return WholeAnswer(
        run,
        front.metrics,
        lambda head: CompletionBody(head, prompts=len(prompts), n=n, logprobs=logprobs),
    )


def _output(request: CompletionRequest) -> Output:
    if request.echo and request.logprobs is not None:
        raise InvalidRequest(
            "logprobs: A prompt's own log probabilities are not supported; ask for them without "
            "echo.",
            param="logprobs",
            code="unsupported_parameter",
        )
    return Output(
        logprobs=request.logprobs,
        echo=bool(request.echo),
        constraint=parameters.constraint(request),
    )


def _own_seed(sampling: Sampling) -> Sampling:
    """A given seed makes each prompt's answer what it is alone; without one, equal prompts are to
    differ."""
    return replace(sampling, seed=randbits(63))


def _choices(request: CompletionRequest, prompts: int) -> int:
    n = request.n or 1
    if n * prompts > MAX_CHOICES:
        raise InvalidRequest(f"At most {MAX_CHOICES} choices in all.", param="n")
    if request.best_of is not None and request.best_of != n:
        raise InvalidRequest("best_of is not supported, but as equal to n.", param="best_of")
    return n


def _max_tokens(request: CompletionRequest) -> int | None:
    if request.max_tokens is None:
        return None
    if request.max_tokens == 0 and not request.echo:
        raise InvalidRequest("max_tokens: Input should be at least 1.", param="max_tokens")
    return min(request.max_tokens, MAX_COUNT)
