"""From a request's fields to what travels to a worker, and what fields forbid each other.

Which conversation a request belongs to: requests with the same key go to the same worker, whose
cache holds what they have in common.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from typing import Any

from mayfly_protocol.requests import Constraint, Ending, Sampling, TextPrompt, TokenPrompt
from mayfly_server.api.openai.usage import UsageReport
from mayfly_server.api.request_fields import MAX_COUNT, CommonFields
from mayfly_server.errors import InvalidRequest
from mayfly_server.http import sse
from mayfly_server.http.body import parse_json

_TEXT_HEAD = 512
_TOKENS_HEAD = 128


def named_key(name: str) -> bytes:
    """Of a conversation that its client has named."""
    return _digest("name", name)


def chat_key(messages: tuple[dict[str, Any], ...]) -> bytes:
    """What every turn of a conversation begins with: all up to the first user message."""
    ends = (i + 1 for i, message in enumerate(messages) if message["role"] == "user")
    return _digest("chat", sse.encode(messages[: next(ends, 1)]))


def prompt_key(prompt: TextPrompt | TokenPrompt) -> bytes:
    match prompt:
        case TextPrompt(text):
            return _digest("text", text[:_TEXT_HEAD])
        case TokenPrompt(ids):
            return _digest("tokens", str(ids[:_TOKENS_HEAD]))


def _digest(kind: str, content: str) -> bytes:
    return hashlib.blake2b(f"{kind}\0{content}".encode(), digest_size=16).digest()


COLDEST = 1e-3
"""Below this, dividing by the temperature overflows, and every draw is the likeliest token: it is
greedy."""


def sampling(fields: CommonFields) -> Sampling:
    temperature = 1.0 if fields.temperature is None else fields.temperature
    top_p = 1.0 if fields.top_p is None else fields.top_p
    top_k = fields.top_k or 0
    if temperature < COLDEST or top_p == 0:
        temperature, top_p = 0.0, 1.0
    return Sampling(
        seed=secrets.randbits(63) if fields.seed is None else fields.seed,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k if 0 < top_k <= MAX_COUNT else 0,
        min_p=fields.min_p or 0.0,
        repetition_penalty=fields.repetition_penalty or 1.0,
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        logit_bias=tuple((int(key), bias) for key, bias in (fields.logit_bias or {}).items()),
    )


def ending(fields: CommonFields, max_tokens: int | None, *, formatted: bool) -> Ending:
    """Raises InvalidRequest where more tokens are demanded than allowed, by ``max_tokens`` or by a
    format that the output follows: nothing can come after its end."""
    min_tokens = fields.min_tokens or 0
    asked = {"min_tokens": min_tokens > 0, "ignore_eos": fields.ignore_eos}
    for name in (name for name, value in asked.items() if value and formatted):
        raise InvalidRequest(
            f"{name}: an output that has to follow a format, or to call a tool, ends with it.",
            param=name,
        )
    if max_tokens is not None and min_tokens > max_tokens:
        raise InvalidRequest("min_tokens is more than max_tokens.", param="min_tokens")
    return Ending(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=tuple(fields.stop or ()),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        ignore_eos=bool(fields.ignore_eos),
        include_stop=bool(fields.include_stop_str_in_output),
    )


def usage_report(fields: CommonFields) -> UsageReport:
    """The chunks that report token counts. Raises InvalidRequest where nothing is streamed."""
    options = fields.stream_options
    if options is None:
        return "never"
    if not fields.stream:
        raise InvalidRequest(
            "stream_options can only be given with stream.", param="stream_options"
        )
    if options.continuous_usage_stats:
        if not options.include_usage:
            raise InvalidRequest(
                "continuous_usage_stats needs include_usage.",
                param="stream_options.continuous_usage_stats",
            )
        return "in every chunk"
    return "in the last chunk" if options.include_usage else "never"


def constraint(
    fields: CommonFields, response_format: Constraint | None = None
) -> Constraint | None:
    """The format that the output has to follow. Raises InvalidRequest for more than one."""
    asked = {
        "guided_json": _guided_json(fields.guided_json),
        "guided_regex": _guided("regex", fields.guided_regex),
        "guided_choice": _guided("choice", fields.guided_choice),
        "guided_grammar": _guided("grammar", fields.guided_grammar),
        "response_format": response_format,
    }
    given = {name: found for name, found in asked.items() if found is not None}
    if len(given) > 1:
        names = sorted(given)
        raise InvalidRequest(f"{' and '.join(names)} exclude each other.", param=names[0])
    return next(iter(given.values()), None)


def _guided(kind: Any, value: str | list[str] | None) -> Constraint | None:
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value)
    return Constraint(kind, text, f"guided_{kind}")


def _guided_json(schema: Any) -> Constraint | None:
    if schema is None:
        return None
    if isinstance(schema, str):
        try:
            schema = parse_json(schema)
        except ValueError as error:
            raise InvalidRequest(
                "guided_json: a text has to be a JSON schema.", param="guided_json"
            ) from error
    if not isinstance(schema, dict):
        raise InvalidRequest("guided_json: Input should be a JSON schema.", param="guided_json")
    return Constraint("json_schema", json.dumps(schema), "guided_json")
