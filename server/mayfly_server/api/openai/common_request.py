"""The request fields that OpenAI's chat completions and completions share, and their translation to
a worker's parameters: conditions that end the output, output format, usage reports."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from mayfly_protocol.requests import Constraint, Ending, Sampling
from mayfly_server.api.openai.usage import UsageReport
from mayfly_server.api.request_fields import (
    MAX_CHOICES,
    MAX_COUNT,
    MAX_STOPS,
    EmptyAsNull,
    Hint,
    SamplingFields,
    Strict,
    TokenId,
    refused,
)
from mayfly_server.errors import InvalidRequest
from mayfly_server.http.body import parse_json

MAX_STOP_LENGTH = 4096
MAX_WORDS, MAX_WORD_LENGTH = 256, 256
MAX_ALLOWED = 65_536


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


OtherGrammar = Annotated[
    None, BeforeValidator(refused("Use guided_grammar, which takes a grammar of Lark's form"))
]


def _not_blank(words: list[str]) -> list[str]:
    if not all(word.strip() for word in words):
        raise PydanticCustomError("blank_word", "A word has to have more than whitespace")
    return words


BadWords = Annotated[
    list[Annotated[str, Field(max_length=MAX_WORD_LENGTH)]],
    Field(max_length=MAX_WORDS),
    AfterValidator(_not_blank),
]


def _some_tokens(count: int | None) -> int | None:
    if count == 0:
        raise PydanticCustomError("no_tokens", "Input should be -1, or at least 1")
    return count


SchemaOrText = Annotated[
    Any,
    WithJsonSchema(
        {"type": ["object", "string", "null"], "description": "A JSON schema; as guided_json."}
    ),
]


class StructuredOutputs(Strict):
    """Output formats under vLLM's newer names; one of ``json``, ``regex``, ``choice``, ``grammar``
    and ``json_object`` can be given."""

    json_: Annotated[SchemaOrText, Field(alias="json")] = None
    regex: Annotated[str | None, Field(min_length=1, description="As guided_regex.")] = None
    choice: Annotated[
        list[str] | None, Field(min_length=1, max_length=1024, description="As guided_choice.")
    ] = None
    grammar: Annotated[str | None, Field(min_length=1, description="As guided_grammar.")] = None
    json_object: bool | None = None
    structural_tag: Annotated[None, BeforeValidator(refused("Use tools, or json"))] = None
    whitespace_pattern: Annotated[
        None, BeforeValidator(refused("JSON is written without whitespace here"))
    ] = None
    disable_additional_properties: Annotated[
        None,
        BeforeValidator(refused("Have the schema say additionalProperties: false", but=(False,))),
    ] = None
    disable_any_whitespace: Hint = None
    disable_fallback: Hint = None


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
    prompt_logprobs: Annotated[
        int | None,
        Field(ge=0, le=20, description="Alternatives for each token of the prompt, as in vLLM."),
    ] = None

    bad_words: Annotated[
        BadWords | None, Field(description="Words that are not generated, as in vLLM.")
    ] = None
    allowed_token_ids: Annotated[
        list[TokenId] | None,
        Field(max_length=MAX_ALLOWED, description="The only tokens that may be generated."),
    ] = None
    truncate_prompt_tokens: Annotated[
        int | None,
        Field(
            ge=-1,
            description="Number of the prompt's last tokens that are kept; -1: as many as leave "
            "room for max_tokens in the context.",
        ),
        AfterValidator(_some_tokens),
    ] = None
    skip_special_tokens: Annotated[
        bool | None, Field(description="false: special tokens are part of the text.")
    ] = None
    spaces_between_special_tokens: Hint = None
    return_token_ids: Annotated[
        bool | None, Field(description="Adds token_ids and prompt_token_ids, as in vLLM.")
    ] = None

    guided_json: Annotated[Any, Field(description="A JSON schema, as an object or a text.")] = None
    guided_regex: Annotated[str, Field(min_length=1)] | None = None
    guided_choice: Annotated[list[str], Field(min_length=1, max_length=1024)] | None = None
    guided_grammar: Annotated[str, Field(min_length=1)] | None = None
    structured_outputs: StructuredOutputs | None = None
    json_schema: Annotated[SchemaOrText, EmptyAsNull] = None
    regex: Annotated[str | None, EmptyAsNull, Field(description="As guided_regex.")] = None

    # Hints without effect on the answer.
    user: Annotated[str | None, Field(description="Accepted, without effect.")] = None
    priority: Hint = None
    client_metadata: Hint = None

    # Fields of other servers that would change the answer.
    grammar: OtherGrammar = None
    ebnf: OtherGrammar = None
    return_tokens_as_token_ids: Annotated[
        None, BeforeValidator(refused("Use return_token_ids", but=(False,)))
    ] = None
    n_probs: Annotated[None, BeforeValidator(refused("Use logprobs", but=(0,)))] = None
    adapters: Annotated[
        None, BeforeValidator(refused("Use the option --adapter where the model is served"))
    ] = None
    role_mapping: Annotated[
        None, BeforeValidator(refused("Use the roles of the model's chat template"))
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


def asked_prompt_logprobs(fields: CommonFields) -> int | None:
    """The number of alternatives for each token of the prompt, if the request asks for its log
    probabilities. Raises InvalidRequest if the answer is streamed, since chunks have no field for
    them."""
    if fields.prompt_logprobs is not None and fields.stream:
        raise InvalidRequest(
            "prompt_logprobs: the log probabilities of a prompt are not streamed; leave out "
            "stream, or use /v1/completions with echo and logprobs.",
            param="prompt_logprobs",
        )
    return fields.prompt_logprobs


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
    newer = fields.structured_outputs or StructuredOutputs()
    asked = {
        "guided_json": ("json_schema", fields.guided_json),
        "guided_regex": ("regex", fields.guided_regex),
        "guided_choice": ("choice", fields.guided_choice),
        "guided_grammar": ("grammar", fields.guided_grammar),
        "json_schema": ("json_schema", fields.json_schema),
        "regex": ("regex", fields.regex),
        "structured_outputs.json": ("json_schema", newer.json_),
        "structured_outputs.regex": ("regex", newer.regex),
        "structured_outputs.choice": ("choice", newer.choice),
        "structured_outputs.grammar": ("grammar", newer.grammar),
        "structured_outputs.json_object": ("json_object", newer.json_object or None),
    }
    given = {
        name: _constraint(kind, value, name)
        for name, (kind, value) in asked.items()
        if value is not None
    }
    if response_format is not None:
        given["response_format"] = response_format
    if len(given) > 1:
        names = sorted(given)
        raise InvalidRequest(f"{' and '.join(names)} exclude each other.", param=names[0])
    return next(iter(given.values()), None)


def _constraint(kind: Any, value: Any, name: str) -> Constraint:
    """The format that the field ``name`` asks for by its ``value``."""
    match kind:
        case "json_object":
            return Constraint(kind, param=name)
        case "json_schema":
            return Constraint(kind, json.dumps(_schema(value, name)), name)
        case "choice":
            return Constraint(kind, json.dumps(value), name)
    return Constraint(kind, value, name)


def _schema(schema: Any, name: str) -> dict[str, Any]:
    if isinstance(schema, str):
        try:
            schema = parse_json(schema)
        except ValueError as error:
            raise InvalidRequest(f"{name}: a text has to be a JSON schema.", param=name) from error
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{name}: Input should be a JSON schema.", param=name)
    return schema


def ban_fields(fields: CommonFields, drawn: Sampling, *, formatted: bool) -> Sampling:
    """The sampling parameters ``drawn`` with the words and token ids that the request forbids.
    Raises InvalidRequest if the output has to follow a format, or to call a tool: what is forbidden
    could be all that the format allows."""
    asked = {"bad_words": fields.bad_words, "allowed_token_ids": fields.allowed_token_ids}
    for name in (name for name, value in asked.items() if value and formatted):
        raise InvalidRequest(
            f"{name}: an output that has to follow a format, or to call a tool, has the tokens of "
            "that format; forbid them there.",
            param=name,
        )
    return replace(
        drawn,
        bad_words=tuple(fields.bad_words or ()),
        allowed_ids=tuple(dict.fromkeys(fields.allowed_token_ids or ())),
    )


def prompt_limit(fields: CommonFields) -> int | None:
    """The number of tokens that are kept of the prompt, None for all."""
    limit = fields.truncate_prompt_tokens
    return None if limit is None else min(limit, MAX_COUNT)
