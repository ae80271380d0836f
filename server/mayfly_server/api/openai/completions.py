"""``POST /v1/completions``.

What ``POST /v1/completions`` takes.

Answers of ``POST /v1/completions``: chunks of a stream, and the whole.

Choices are numbered through all prompts: prompt * n + choice.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from secrets import randbits
from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from mayfly_protocol.requests import Generation, Output, Sampling, TextPrompt, TokenPrompt
from mayfly_protocol.serving import Delta, Usage
from mayfly_server.api import parameters
from mayfly_server.api.answer import GenerationJob, Head, StreamedAnswer, WholeAnswer
from mayfly_server.api.dependencies import FrontDep, TenantDep
from mayfly_server.api.fields import (
    MAX_CHOICES,
    MAX_COUNT,
    CommonFields,
)
from mayfly_server.api.logprobs import CompletionLogprobs, empty_lists
from mayfly_server.api.parameters import prompt_key
from mayfly_server.api.schemas.base import streamed
from mayfly_server.api.schemas.completions import TEXT_EVENTS, TextCompletion, TextEvent
from mayfly_server.api.usage import ChunkEnds, Told, usage_object
from mayfly_server.errors import InvalidRequest
from mayfly_server.http import sse
from mayfly_server.http.body import StrictRoute

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


def _content(head: Head) -> dict[str, Any]:
    return {
        "id": head.id,
        "object": "text_completion",
        "created": head.created,
        "model": head.model,
        "system_fingerprint": head.fingerprint,
    }


class CompletionChunks(sse.OpenAIEnds):
    """A choice's last chunk carries the finish reason."""

    def __init__(self, head: Head, *, n: int, logprobs: bool, usage: Told) -> None:
        self._content = _content(head)
        self._opening = f'data: {sse.encode(self._content)[:-1]},"choices":['
        self._n = n
        self._usage = ChunkEnds(usage, head.prompt_tokens)
        self._logprobs: dict[int, CompletionLogprobs] | None = {} if logprobs else None

    def chunk(self, prompt: int, delta: Delta) -> str:
        self._usage.count(delta)
        index = prompt * self._n + delta.choice
        logprobs = None
        if self._logprobs is not None and delta.logprobs:
            logprobs = self._logprobs.setdefault(index, CompletionLogprobs()).take(delta.logprobs)
        if not delta.text and logprobs is None and delta.finish is None:
            return ""
        content = {
            "index": index,
            "text": delta.text,
            "logprobs": logprobs,
            "finish_reason": delta.finish,
        }
        return f"{self._opening}{sse.encode(content)}{self._usage.closing}"

    def end(self, usage: Usage) -> str:
        if not self._usage.at_the_end:
            return sse.DONE
        last = self._content | {"choices": [], "usage": usage_object(usage)}
        return sse.event(last) + sse.DONE


@dataclass(slots=True)
class _Choice:
    text: list[str] = field(default_factory=list)
    finish: str | None = None
    logprobs: CompletionLogprobs = field(default_factory=CompletionLogprobs)
    lists: dict[str, list[Any]] = field(default_factory=empty_lists)


class CompletionBody:
    def __init__(self, head: Head, *, prompts: int, n: int, logprobs: bool) -> None:
        self._head = head
        self._n = n
        self._logprobs = logprobs
        self._choices = [_Choice() for _ in range(prompts * n)]

    def add(self, prompt: int, delta: Delta) -> None:
        choice = self._choices[prompt * self._n + delta.choice]
        choice.text.append(delta.text)
        choice.finish = delta.finish or choice.finish
        for name, values in choice.logprobs.take(delta.logprobs).items():
            choice.lists[name] += values

    def content(self, usage: Usage) -> dict[str, Any]:
        return _content(self._head) | {
            "choices": [
                {
                    "index": index,
                    "text": "".join(choice.text),
                    "logprobs": choice.lists if self._logprobs else None,
                    "finish_reason": choice.finish,
                }
                for index, choice in enumerate(self._choices)
            ],
            "usage": usage_object(usage),
        }


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
    job = GenerationJob(
        front, generations, prefix="cmpl-", key=prompt_key(prompts[0]), tenant=tenant
    )
    logprobs = request.logprobs is not None
    if request.stream:
        return StreamedAnswer(
            job,
            lambda head: CompletionChunks(head, n=n, logprobs=logprobs, usage=usage),
        )
    return WholeAnswer(
        job,
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
