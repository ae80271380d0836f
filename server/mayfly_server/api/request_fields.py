"""The fields that chat completions and completions have in common, checked once for both.

Types are strict (a boolean is true or false, a number is no string), null means the default, and
a field that is not listed is refused: nothing that a client asks for is silently ignored. What
OpenAI documents and this server does not do is listed too, as :data:`Unsupported`, so that the
error can say so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

MAX_CHOICES = 128
MAX_STOPS = 4
MAX_STOP_LENGTH = 4096
MAX_BIASES = 1024
MAX_SEED = 2**63 - 1
MAX_COUNT = 2**31 - 1
"""Larger numbers of tokens, which no context holds, are read as this one."""
MAX_MESSAGES = 16_384


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


def refused(reason: str) -> Callable[[Any], Any]:
    """A validator that takes null alone."""

    def check(value: Any) -> Any:
        if value is not None:
            raise PydanticCustomError("unsupported", "{reason}", {"reason": reason})
        return value

    return check


def _one_or_several(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _no_empty(values: list[str]) -> list[str]:
    if "" in values:
        raise PydanticCustomError("empty_stop", "An empty string would stop everything")
    return values


def _token_ids(value: dict[str, float]) -> dict[str, float]:
    for key in value:
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise PydanticCustomError("token_id", "Keys have to be token ids")
    return value


def _not_a_boolean(value: Any) -> Any:
    """JSON's true is Python's 1."""
    if isinstance(value, bool):
        raise PydanticCustomError("number", "Input should be a number")
    return value


Unsupported = Annotated[None, BeforeValidator(refused("This is not supported by this server"))]
Number = Annotated[float, BeforeValidator(_not_a_boolean)]
Count = Annotated[int, Field(ge=1), AfterValidator(lambda count: min(count, MAX_COUNT))]
TokenId = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Stops = Annotated[
    list[Annotated[str, Field(max_length=MAX_STOP_LENGTH)]],
    BeforeValidator(_one_or_several, json_schema_input_type=str | list[str]),
    Field(max_length=MAX_STOPS),
    AfterValidator(_no_empty),
]
LogitBias = Annotated[
    dict[str, Annotated[Number, Field(ge=-100, le=100)]],
    Field(max_length=MAX_BIASES),
    AfterValidator(_token_ids),
]


ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: Annotated[
        bool | None, Field(description="With include_usage: every chunk has the usage so far.")
    ] = None
    include_obfuscation: Annotated[
        Literal[False] | None, Field(description="Only false: chunks are never padded.")
    ] = None


class CommonFields(Strict):
    """See the module."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None

    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, description="0 and -1: off.")] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Number, Field(ge=0.01, le=10)] | None = None
    logit_bias: LogitBias | None = None

    stop: Stops | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=256)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None

    guided_json: Annotated[Any, Field(description="A JSON schema, as an object or a text.")] = None
    guided_regex: Annotated[str, Field(min_length=1)] | None = None
    guided_choice: Annotated[list[str], Field(min_length=1, max_length=1024)] | None = None
    guided_grammar: Annotated[str, Field(min_length=1)] | None = None

    user: Annotated[str | None, Field(description="Taken, and of no effect.")] = None
