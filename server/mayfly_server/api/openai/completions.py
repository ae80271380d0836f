"""OpenAI's ``POST /v1/completions``: the request, the answers (chunks of a stream, or one object)
and the route.

A request has one or several prompts, with ``n`` choices each. The index of a choice in the answer
is the prompt's index * n + the choice's index within its prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from secrets import randbits
from typing import Annotated, Any, Literal, NotRequired, cast

from fastapi import APIRouter, Response
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from mayfly_protocol.requests import (
    FinishReason,
    Generation,
    Output,
    TextPrompt,
    TokenPrompt,
)
from mayfly_protocol.serving import Delta, TokenLogprob, Usage
from mayfly_server.api.affinity_keys import prompt_key
from mayfly_server.api.answer import GenerationJob, Head, StreamedAnswer, WholeAnswer
from mayfly_server.api.dependencies import FrontDep, TenantDep
from mayfly_server.api.openai.common_request import (
    CommonFields,
    asked_prompt_logprobs,
    ban_fields,
    constraint,
    ending,
    prompt_limit,
    usage_report,
)
from mayfly_server.api.openai.logprobs import (
    PromptLogprobs,
    TextLogprobs,
    TextLogprobsWriter,
    empty_lists,
    prompt_logprobs,
)
from mayfly_server.api.openai.usage import (
    ChunkUsage,
    CompletionUsage,
    StreamUsage,
    UsageReport,
    completion_usage,
)
from mayfly_server.api.openapi import AnswerObject, streamed
from mayfly_server.api.request_fields import MAX_CHOICES, MAX_COUNT, refused, sampling, unseeded
from mayfly_server.errors import ErrorAnswer, InvalidRequest
from mayfly_server.http import sse
from mayfly_server.http.body import StrictRoute

Prompts = list[TextPrompt | TokenPrompt]
_FORMS = "a string, a list of strings, a list of token ids, or a list of such lists"


def _prompts(value: Any) -> Prompts:
    """Reads the field ``prompt``, in any of its four forms (text, list of texts, token ids, list of
    lists of token ids), as a list of prompts."""
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


_OF_CHATS = "Use /v1/chat/completions, which has this"
OfChats = Annotated[None, BeforeValidator(refused(_OF_CHATS))]
InThePrompt = Annotated[None, BeforeValidator(refused("Send it as a part of the prompt"))]
OtherLength = Annotated[None, BeforeValidator(refused("Use max_tokens instead", but=(-1,)))]


class CompletionRequest(CommonFields):
    """The body of ``POST /v1/completions``."""

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
    max_tokens: (
        Annotated[int, Field(ge=0, description="0 only with echo or prompt_logprobs.")] | None
    ) = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: bool | None = None
    add_special_tokens: Annotated[
        bool | None, Field(description="false: the prompt's text begins without special tokens.")
    ] = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    suffix: Annotated[None, BeforeValidator(_no_suffix)] = None

    # Fields of other APIs that would change the answer.
    messages: OfChats = None
    tools: OfChats = None
    tool_choice: Annotated[None, BeforeValidator(refused(_OF_CHATS, but=("none", "auto")))] = None
    functions: OfChats = None
    function_call: Annotated[None, BeforeValidator(refused(_OF_CHATS, but=("none", "auto")))] = None
    system: InThePrompt = None
    instructions: InThePrompt = None
    input: InThePrompt = None
    response_format: Annotated[
        None,
        BeforeValidator(
            refused("Use guided_json, or /v1/chat/completions", but=({"type": "text"},))
        ),
    ] = None
    max_completion_tokens: OtherLength = None
    max_output_tokens: OtherLength = None
    max_new_tokens: OtherLength = None
    n_predict: OtherLength = None
    stop_sequences: Annotated[None, BeforeValidator(refused("Use stop instead"))] = None
    top_logprobs: Annotated[None, BeforeValidator(refused("Use logprobs instead", but=(0,)))] = None


class TextChoice(AnswerObject):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptLogprobs]


class TextCompletion(AnswerObject):
    id: str
    object: Literal["text_completion"]
    created: Annotated[int, Field(description="Seconds since 1970.")]
    model: str
    system_fingerprint: str | None
    choices: list[TextChoice]
    usage: CompletionUsage


class TextChunkChoice(AnswerObject):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[
        Annotated[list[int], Field(description="In a choice's first chunk, if asked for.")]
    ]


class TextCompletionChunk(AnswerObject):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[TextChunkChoice]
    usage: NotRequired[ChunkUsage]


TextEvent = TextCompletionChunk | ErrorAnswer

TEXT_EVENTS = """\
data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"m",\
"system_fingerprint":"fp_1","choices":[{"index":0,"text":" Paris.","logprobs":null,\
"finish_reason":"stop"}]}

data: [DONE]

"""


class CompletionChunks(sse.OpenAIEnds):
    """Writes the chunks of a text completion's stream. A choice's last chunk has the finish reason;
    with ``ids`` its first chunk has the token ids of its prompt, and chunks have those that they
    add."""

    def __init__(
        self, head: Head, *, n: int, logprobs: bool, usage: UsageReport, ids: bool = False
    ) -> None:
        self._ids = ids
        self._prompt_ids = head.prompt_ids
        self._begun: set[int] = set()
        self._last: TextCompletionChunk = {
            "id": head.id,
            "object": "text_completion",
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.fingerprint,
            "choices": [],
        }
        self._opening = f"data: {sse.encode(self._last).removesuffix(']}')}"
        self._n = n
        self._usage = StreamUsage(usage, head.prompt_tokens)
        self._writers: dict[int, TextLogprobsWriter] | None = {} if logprobs else None

    def chunk(self, prompt: int, delta: Delta) -> str:
        self._usage.count(delta)
        index = prompt * self._n + delta.choice
        logprobs = None
        if self._writers is not None and (delta.prompt_logprobs or delta.logprobs):
            logprobs = empty_lists()
            writer = self._writers.setdefault(index, TextLogprobsWriter())
            writer.append((*delta.prompt_logprobs, *delta.logprobs), logprobs)
        ids = list(delta.ids) if self._ids else []
        if not delta.text and logprobs is None and delta.finish is None and not ids:
            return ""
        content: TextChunkChoice = {
            "index": index,
            "text": delta.text,
            "logprobs": logprobs,
            "finish_reason": delta.finish,
        }
        if self._ids:
            content["token_ids"] = ids
            if index not in self._begun:
                self._begun.add(index)
                content["prompt_token_ids"] = list(self._prompt_ids[prompt])
        return f"{self._opening}{sse.encode(content)}{self._usage.closing}"

    def end(self, usage: Usage) -> str:
        if not self._usage.in_last_chunk:
            return sse.DONE
        self._last["usage"] = completion_usage(usage)
        return sse.event(self._last) + sse.DONE


@dataclass(slots=True)
class _Choice:
    text: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    writer: TextLogprobsWriter = field(default_factory=TextLogprobsWriter)
    logprobs: TextLogprobs = field(default_factory=empty_lists)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)


class CompletionBody:
    """Collects the pieces of generated text into the one object of a text completion that is not
    streamed. The prompt's log probabilities come first among those of the text if the text begins
    with the prompt (``echo``), and have a field of their own if ``prompt_logprobs`` is asked for;
    so have the token ids of prompts and choices with ``return_token_ids``."""

    def __init__(self, head: Head, request: CompletionRequest, *, prompts: int, n: int) -> None:
        self._ids = bool(request.return_token_ids)
        self._head = head
        self._n = n
        self._logprobs = request.logprobs is not None
        self._echo = request.echo
        self._scored = request.prompt_logprobs is not None
        self._choices = [_Choice() for _ in range(prompts * n)]

    def add(self, prompt: int, delta: Delta) -> None:
        choice = self._choices[prompt * self._n + delta.choice]
        choice.text.append(delta.text)
        choice.ids += delta.ids
        choice.finish = delta.finish or choice.finish
        if self._scored:
            choice.prompt_logprobs += delta.prompt_logprobs
        if self._echo:
            choice.writer.append(delta.prompt_logprobs, choice.logprobs)
        choice.writer.append(delta.logprobs, choice.logprobs)

    def content(self, usage: Usage) -> TextCompletion:
        found: TextCompletion = {
            "id": self._head.id,
            "object": "text_completion",
            "created": self._head.created,
            "model": self._head.model,
            "system_fingerprint": self._head.fingerprint,
            "choices": [
                {
                    "index": index,
                    "text": "".join(choice.text),
                    "logprobs": choice.logprobs if self._logprobs else None,
                    "finish_reason": cast(FinishReason, choice.finish),  # set at the end
                }
                for index, choice in enumerate(self._choices)
            ],
            "usage": completion_usage(usage),
        }
        if self._scored:
            for content, choice in zip(found["choices"], self._choices, strict=True):
                content["prompt_logprobs"] = prompt_logprobs(choice.prompt_logprobs)
        if self._ids:
            for content, choice in zip(found["choices"], self._choices, strict=True):
                content["token_ids"] = choice.ids
                content["prompt_token_ids"] = list(
                    self._head.prompt_ids[content["index"] // self._n]
                )
        return found


router = APIRouter(route_class=StrictRoute)


@router.post(
    "/v1/completions",
    response_class=Response,
    responses={200: streamed(TextCompletion, TextEvent, TEXT_EVENTS, done=True)},
)
async def completions(request: CompletionRequest, front: FrontDep, tenant: TenantDep) -> Response:
    """Continues one or several prompts, in one piece or as a stream of server-sent events."""
    usage = usage_report(request)
    prompts: Prompts = request.prompt
    if request.add_special_tokens is False:
        prompts = [
            replace(prompt, special=False) if isinstance(prompt, TextPrompt) else prompt
            for prompt in prompts
        ]
    n = _choices(request, len(prompts))
    output = _output(request)
    formatted = output.constraint is not None
    ends = ending(request, _max_tokens(request), formatted=formatted)
    drawn = ban_fields(request, sampling(request), formatted=formatted)
    model = await front.model(request.model)
    generations = [
        Generation(
            model=model.name,
            prompt=prompt,
            # With a given seed, each prompt's answer is the same as in a request of its own;
            # without a seed, equal prompts get different answers.
            sampling=replace(drawn, seed=randbits(63)) if unseeded(request) else drawn,
            ending=ends,
            output=output,
            n=n,
            prompt_limit=prompt_limit(request),
        )
        for prompt in prompts
    ]
    job = GenerationJob(
        front, generations, prefix="cmpl-", key=prompt_key(prompts[0]), tenant=tenant
    )
    if request.stream:
        logprobs = request.logprobs is not None
        return StreamedAnswer(
            job,
            lambda head: CompletionChunks(
                head, n=n, logprobs=logprobs, usage=usage, ids=output.prompt_ids
            ),
        )
    return WholeAnswer(
        job,
        lambda head: CompletionBody(head, request, prompts=len(prompts), n=n),
    )


def _output(request: CompletionRequest) -> Output:
    scored = asked_prompt_logprobs(request)
    if request.echo and request.logprobs is not None:
        if scored not in (None, request.logprobs):
            raise InvalidRequest(
                "prompt_logprobs: with echo and logprobs the prompt has as many alternatives as "
                "logprobs says; give the same number, or leave one of them out.",
                param="prompt_logprobs",
            )
        scored = request.logprobs
    if request.echo and request.truncate_prompt_tokens is not None:
        raise InvalidRequest(
            "truncate_prompt_tokens and echo exclude each other.", param="truncate_prompt_tokens"
        )
    return Output(
        logprobs=request.logprobs,
        echo=bool(request.echo),
        constraint=constraint(request),
        special_tokens=request.skip_special_tokens is False,
        prompt_ids=bool(request.return_token_ids),
        prompt_logprobs=scored,
    )


def _choices(request: CompletionRequest, prompts: int) -> int:
    n = request.n or 1
    if n * prompts > MAX_CHOICES:
        raise InvalidRequest(f"At most {MAX_CHOICES} choices in all.", param="n")
    if request.best_of is not None and request.best_of != n:
        raise InvalidRequest("best_of is only supported if it equals n.", param="best_of")
    return n


def _max_tokens(request: CompletionRequest) -> int | None:
    if request.max_tokens is None:
        return None
    if request.max_tokens == 0 and not request.echo and request.prompt_logprobs is None:
        raise InvalidRequest("max_tokens: Input should be at least 1.", param="max_tokens")
    return min(request.max_tokens, MAX_COUNT)
