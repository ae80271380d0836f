"""The routes ``POST /tokenize``, which turns a text or chat into a model's token ids, and ``POST
/detokenize``, which turns token ids into text. A worker of the model does the work."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Response
from pydantic import ConfigDict, Field

from mayfly_protocol.requests import ChatPrompt, TextPrompt
from mayfly_protocol.serving import Detokenize, Detokenized, Tokenize, Tokenized
from mayfly_server.api.dependencies import FrontDep
from mayfly_server.api.openai.chat_prompt import chat_prompt
from mayfly_server.api.openai.chat_request import ChatRequest, Messages, Tools
from mayfly_server.api.openapi import AnswerObject
from mayfly_server.api.request_fields import Strict, TemplateKwargs, TokenId
from mayfly_server.dispatch.tokenize import ask_worker
from mayfly_server.errors import InvalidRequest
from mayfly_server.http import sse
from mayfly_server.http.body import StrictRoute

router = APIRouter(route_class=StrictRoute)


class TokenizeRequest(Strict):
    """The body of ``POST /tokenize``: a text in ``prompt``, or a chat in ``messages``."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"prompt": "Once upon a time"},
                {"messages": [{"role": "user", "content": "hi"}]},
            ]
        }
    )

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: Annotated[
        bool | None,
        Field(description="Only with prompt: add the tokenizer's special tokens (default)."),
    ] = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None


class TokenizeResponse(AnswerObject):
    count: int
    max_model_len: Annotated[int | None, Field(description="The model's context in tokens.")]
    tokens: Sequence[int]


class DetokenizeRequest(Strict):
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"tokens": [1, 2, 3]},
            ]
        }
    )

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(min_length=1)]


class DetokenizeResponse(AnswerObject):
    prompt: str


@router.post("/tokenize", response_model=None, responses={200: {"model": TokenizeResponse}})
async def tokenize(request: TokenizeRequest, front: FrontDep) -> Response:
    """Returns the token ids of a text or chat, as the model would get them."""
    prompt = asked_prompt(request)
    model = await (
        front.chat_model(request.model)
        if isinstance(prompt, ChatPrompt)
        else front.model(request.model)
    )
    special = request.add_special_tokens is not False
    question = partial(Tokenize, prompt=prompt, special=special)
    found = await ask_worker(front.fleet, front.settings, model.name, question)
    assert isinstance(found, Tokenized)
    context = model.card.context or None if model.card else None
    content: TokenizeResponse = {
        "count": found.count,
        "max_model_len": context,
        "tokens": found.ids,
    }
    # FastAPI would copy the tokens one by one. There may be millions, and the event loop could
    # serve no other client during the copy.
    return Response(sse.encode(content), media_type="application/json")


@router.post("/detokenize", response_model=None, responses={200: {"model": DetokenizeResponse}})
async def detokenize(request: DetokenizeRequest, front: FrontDep) -> DetokenizeResponse:
    """Returns the text of the given token ids, with the text of special tokens."""
    model = await front.model(request.model)
    question = partial(Detokenize, ids=tuple(request.tokens))
    found = await ask_worker(front.fleet, front.settings, model.name, question)
    assert isinstance(found, Detokenized)
    return {"prompt": found.text}


def asked_prompt(request: TokenizeRequest) -> ChatPrompt | TextPrompt:
    """The text or chat that a tokenize request holds. Raises InvalidRequest if the request has both
    or neither, or fields that belong to the other form."""
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequest("Either prompt or messages has to be given.", param="prompt")
    if request.messages is not None:
        if request.add_special_tokens is not None:
            raise InvalidRequest(
                "add_special_tokens: A chat's template adds what it wants.",
                param="add_special_tokens",
            )
        return chat_prompt(_as_chat(request))
    for name in (
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template_kwargs",
    ):
        if getattr(request, name) is not None:
            raise InvalidRequest(f"{name} goes with messages.", param=name)
    return TextPrompt(request.prompt or "")


def _as_chat(request: TokenizeRequest) -> ChatRequest:
    return ChatRequest(**{name: getattr(request, name) for name in _CHAT_FIELDS})


_CHAT_FIELDS = sorted(TokenizeRequest.model_fields.keys() & ChatRequest.model_fields.keys())
"""Names of the fields that TokenizeRequest and ChatRequest both have, with the same types."""
