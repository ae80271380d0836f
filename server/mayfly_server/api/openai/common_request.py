"""The request fields that OpenAI's chat completions and completions share, and their translation to
a worker's parameters: conditions that end the output, output format, usage reports."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from mayfly_protocol.requests import Constraint, Ending
from mayfly_server.api.openai.usage import UsageReport
from mayfly_server.api.request_fields import (
    MAX_CHOICES,
    MAX_COUNT,
    Hint,
    SamplingFields,
    Strict,
    TokenId,
    Unsupported,
    refused,
)
from mayfly_server.errors import InvalidRequest
from mayfly_server.http.body import parse_json

MAX_STOPS = 4
MAX_STOP_LENGTH = 4096


def _one_or_several(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _no_empty(values: list[str]) -> list[str]:
    if "" in values:
        raise PydanticCustomError("empty_stop", "An empty string would stop everything")
    return values


Stops = Annotated[
    list[Annotated[str, Field(max_length=MAX_STOP_LENGTH)]],
    BeforeValidator(_one_or_several, json_schema_input_type=str | list[str]),
    Field(max_length=MAX_STOPS),
    AfterValidator(_no_empty),
]


OtherFormat = Annotated[
    None,
    BeforeValidator(
        refused("Use response_format, guided_json, guided_regex, guided_choice or guided_grammar")
    ),
]


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: Annotated[
        bool | None,
        Field(description="With include_usage: every chunk has the token counts so far."),
    ] = None
    include_obfuscation: Annotated[
        Literal[False] | None, Field(description="Only false: chunks are never padded.")
    ] = None


class _FirstFields(Strict):
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None


class CommonFields(SamplingFields, _FirstFields):
    """The fields that OpenAI's chat completions and completions share. (Pydantic lists the fields
    of the last base class first, so ``model`` leads in the OpenAPI document.)"""

    stop: Stops | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=256)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None

    guided_json: Annotated[Any, Field(description="A JSON schema, as an object or a text.")] = None
    guided_regex: Annotated[str, Field(min_length=1)] | None = None
    guided_choice: Annotated[list[str], Field(min_length=1, max_length=1024)] | None = None
    guided_grammar: Annotated[str, Field(min_length=1)] | None = None

    # Hints without effect on the answer.
    user: Annotated[str | None, Field(description="Accepted, without effect.")] = None
    priority: Hint = None
    client_metadata: Hint = None

    # Fields of other servers that would change the answer.
    structured_outputs: OtherFormat = None
    grammar: OtherFormat = None
    json_schema: OtherFormat = None
    regex: OtherFormat = None
    ebnf: OtherFormat = None
    allowed_token_ids: Unsupported = None
    bad_words: Unsupported = None
    prompt_logprobs: Unsupported = None
    truncate_prompt_tokens: Annotated[
        None, BeforeValidator(refused("A prompt is never cut; send a shorter one", but=(-1,)))
    ] = None
    use_beam_search: Annotated[
        None, BeforeValidator(refused("Beams are not supported; use n", but=(False,)))
    ] = None


def ending(fields: CommonFields, max_tokens: int | None, *, formatted: bool) -> Ending:
    """The conditions that end the output: token limits, stop strings, stop tokens. ``formatted``
    says that the output has to follow a format or call a tool. Raises InvalidRequest if
    ``min_tokens`` is more than ``max_tokens``, or if the request demands tokens after the end of a
    formatted output."""
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
    """The chunks of the stream that report token counts, as ``stream_options`` demands. Raises
    InvalidRequest if the request has ``stream_options`` without ``stream``."""
    options = fields.stream_options
    if options is None or not (options.include_usage or options.continuous_usage_stats):
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
    return "in the last chunk"


def constraint(
    fields: CommonFields, response_format: Constraint | None = None
) -> Constraint | None:
    """The format (JSON schema, regular expression, grammar ...) that the output has to follow; None
    if the request names no format. Raises InvalidRequest if it names several."""
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
