"""Types of request fields that the APIs of OpenAI and Anthropic share, and the sampling fields.

Types are strict: a boolean is true or false, and a string is no number. Null means the default.
Fields that an API documents but this server does not support are declared as :data:`Unsupported`; a
request that sets such a field is refused, with the reason, unless the value is null or empty.
Unknown fields within objects are refused in the same way, except hints such as ``cache_control``;
:mod:`mayfly_server.http.ignored_fields` has removed unknown fields at the top of a body before.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from mayfly_protocol.requests import Sampling
from mayfly_server.http.body import parse_json
from mayfly_server.http.ignored_fields import HINTS, asks_nothing, field_names

MAX_CHOICES = 128
MAX_BIASES = 1024
MAX_SEED = 2**63 - 1
MAX_COUNT = 2**31 - 1
"""Limit of a number of tokens in a request; larger numbers, which no context holds, are read as
this limit."""
RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Sampling parameters that a model's authors may recommend, in its ``generation_config.json``."""
MAX_MESSAGES = 16_384
MIN_TEMPERATURE = 1e-3
"""Lowest temperature that samples; lower temperatures are read as 0, greedy decoding. Logits
divided by a lower temperature overflow, and every draw would be the likeliest token anyway."""


class Strict(BaseModel):
    """Base of a JSON object in a request: unknown fields are refused, unless they are null, empty
    or hints (fields such as ``cache_control``, which change no answer)."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_idle_fields(cls, value: Any) -> Any:
        return without_idle_fields(value, field_names(cls)) if isinstance(value, dict) else value


def without_idle_fields(value: dict[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The JSON object ``value`` without its unknown fields (not in ``known``) that are null, empty
    or hints; other unknown fields stay, to be refused."""
    idle = [name for name in value.keys() - known if name in HINTS or asks_nothing(value[name])]
    return {name: value[name] for name in value if name not in idle} if idle else value


def refused(reason: str, *, but: tuple[Any, ...] = (), empty: bool = False) -> Callable[[Any], Any]:
    """Returns a pydantic validator that refuses all values with the error text ``reason``, except
    null, empty values and the values in ``but``, which it reads as null. With ``empty``, the
    validator refuses empty values too."""

    def check(value: Any) -> Any:
        default = any(type(value) is type(one) and value == one for one in but)
        if value is None or default or (asks_nothing(value) and not empty):
            return None
        raise PydanticCustomError("unsupported", "{reason}", {"reason": reason})

    return check


def left_out(medium: str) -> str:
    """The text that stands in a prompt for an image or the like that the model cannot read."""
    return f"[{medium} left out: this model reads text only]"


UNREADABLE = "unreadable_arguments"


def call_arguments(text: str) -> dict[str, Any]:
    """The arguments of an earlier tool call as an object, as chat templates take them. A text that
    holds no object, such as that of a call that was cut off, is kept whole as the only argument:
    the client sends it again with every request."""
    try:
        value = parse_json(text) if text.strip() else {}
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {UNREADABLE: text}


def _token_ids(value: dict[str, float]) -> dict[str, float]:
    for key in value:
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise PydanticCustomError("token_id", "Keys have to be token ids")
    return value


def _not_a_boolean(value: Any) -> Any:
    """Refuses JSON's true and false, which Python would take for the numbers 1 and 0."""
    if isinstance(value, bool):
        raise PydanticCustomError("number", "Input should be a number")
    return value


Hint = Annotated[
    Any,
    WithJsonSchema(
        {
            "type": ["null", "boolean", "number", "string", "array", "object"],
            "description": "Accepted, without effect.",
        }
    ),
]
EmptyAsNull = BeforeValidator(lambda value: None if value == "" else value)
"""Reads an empty text, which is no choice, as null."""
Unsupported = Annotated[None, BeforeValidator(refused("This is not supported by this server"))]
ChatsAlone = Annotated[
    None, BeforeValidator(refused("Use /v1/chat/completions, which has this", but=(False, 0)))
]
OneAnswer = Annotated[
    None, BeforeValidator(refused("An answer is one; use /v1/chat/completions for more", but=(1,)))
]
OtherTools = Annotated[None, BeforeValidator(refused("Use tools instead"))]
OtherToolChoice = Annotated[
    None, BeforeValidator(refused("Use tool_choice instead", but=("none", "auto")))
]
NotStored = Annotated[
    None,
    BeforeValidator(
        refused("Nothing is stored here between requests; send the whole conversation")
    ),
]
Number = Annotated[float, BeforeValidator(_not_a_boolean)]
Count = Annotated[int, Field(ge=1), AfterValidator(lambda count: min(count, MAX_COUNT))]
TokenId = Annotated[int, Field(ge=0, le=MAX_COUNT)]
LogitBias = Annotated[
    dict[str, Annotated[Number, Field(ge=-100, le=100)]],
    Field(max_length=MAX_BIASES),
    AfterValidator(_token_ids),
]


TemplateKwargs = Annotated[
    dict[str, Any],
    AfterValidator(
        lambda kwargs: {name: kwargs[name] for name in kwargs if kwargs[name] is not None}
    ),
    Field(
        description="Variables of the model's chat template; a name that it does not read is "
        "refused, except for those that ask for thoughts.",
        examples=[{"enable_thinking": False}],
    ),
]
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]


class SamplingFields(Strict):
    """The request fields of OpenAI and vLLM that control how tokens are sampled."""

    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, description="0 and -1: off.")] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Number, Field(ge=0.01, le=10)] | None = None
    logit_bias: LogitBias | None = None


def sampling(fields: SamplingFields) -> Sampling:
    """The sampling parameters that the front end sends to a worker, with defaults filled in and a
    random seed if the request has none. The parameters that the request does not name are listed,
    for the worker to give them the values that the model's authors recommend."""
    unnamed = tuple(name for name in RECOMMENDED if getattr(fields, name) is None)
    temperature = 1.0 if fields.temperature is None else fields.temperature
    top_p = 1.0 if fields.top_p is None else fields.top_p
    top_k = fields.top_k or 0
    if temperature < MIN_TEMPERATURE or top_p == 0:
        temperature, top_p = 0.0, 1.0
        unnamed = tuple(name for name in unnamed if name not in ("temperature", "top_p"))
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
        unnamed=unnamed,
    )
