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

from mayfly_protocol.requests import Dry, Sampling
from mayfly_server.errors import InvalidRequest
from mayfly_server.http.body import parse_json
from mayfly_server.http.ignored_fields import HINTS, asks_nothing, field_names

MAX_CHOICES = 128
MAX_BIASES = 1024
MIN_SEED, MAX_SEED = -(2**63), 2**64 - 1
MAX_STOPS = 64
MAX_BREAKERS, MAX_BREAKER_CHARACTERS = 32, 128
MAX_REPETITION = 512
"""Largest length of a repetition, in tokens, that a request can allow: longer ones are not told
apart."""
LLAMA_CPP_WINDOW = 64
"""Number of tokens that llama.cpp's penalties look at if a request does not say it."""
DRY_BREAKERS = ("\n", ":", '"', "*")
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


def _few_characters(texts: list[str]) -> list[str]:
    if sum(map(len, texts)) > MAX_BREAKER_CHARACTERS:
        raise PydanticCustomError("breakers", f"At most {MAX_BREAKER_CHARACTERS} characters in all")
    return texts


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
SpecialsInChats = Annotated[
    None, BeforeValidator(refused("Use /v1/chat/completions, which has this", but=(True,)))
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
    seed: Annotated[
        int | None, Field(ge=MIN_SEED, le=MAX_SEED, description="-1: drawn by the server.")
    ] = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Number, Field(ge=0.01, le=10)] | None = None
    logit_bias: LogitBias | None = None

    # Names and further samplers of llama.cpp and mlx-lm.
    repeat_penalty: Annotated[
        Number | None,
        Field(
            ge=0.01,
            le=10,
            description="llama.cpp's repetition_penalty, over the last repeat_last_n tokens.",
        ),
    ] = None
    repeat_last_n: Annotated[
        int | None,
        Field(
            ge=-1,
            description="Number of last tokens, prompt and output, that all penalties count; -1: "
            "all, 0: none. 64 for repeat_penalty.",
        ),
    ] = None
    repetition_context_size: Annotated[
        int | None,
        Field(ge=1, description="As repeat_last_n, for repetition_penalty alone."),
    ] = None
    presence_context_size: Annotated[
        int | None, Field(ge=1, description="As repeat_last_n, for presence_penalty alone.")
    ] = None
    frequency_context_size: Annotated[
        int | None, Field(ge=1, description="As repeat_last_n, for frequency_penalty alone.")
    ] = None
    typical_p: Annotated[
        Number | None, Field(ge=0, le=1, description="Locally typical sampling; 1: off.")
    ] = None
    top_n_sigma: Annotated[
        Number | None,
        Field(
            ge=-1,
            le=1000,
            description="Keeps logits within so many standard deviations of the highest; 0 and "
            "-1: off.",
        ),
    ] = None
    xtc_probability: Annotated[
        Number | None,
        Field(ge=0, le=1, description="Probability with which XTC applies to a token; 0: off."),
    ] = None
    xtc_threshold: Annotated[
        Number | None,
        Field(
            ge=0,
            le=1,
            description="XTC excludes all tokens above this probability but the least likely of "
            "them; 0.1 by default.",
        ),
    ] = None
    dry_multiplier: Annotated[
        Number | None, Field(ge=0, le=100, description="Strength of DRY; 0: off.")
    ] = None
    dry_base: Annotated[Number | None, Field(ge=1, le=100, description="1.75 by default.")] = None
    dry_allowed_length: Annotated[
        int | None,
        Field(
            ge=0,
            le=MAX_REPETITION,
            description="Number of tokens from which DRY penalizes a repetition; 2 by default.",
        ),
    ] = None
    dry_penalty_last_n: Annotated[
        int | None,
        Field(
            ge=-1,
            description="Number of last tokens in which DRY looks for repetitions; -1: all (the "
            "default), 0: none.",
        ),
    ] = None
    dry_sequence_breakers: Annotated[
        list[Annotated[str, Field(min_length=1)]] | None,
        Field(
            min_length=1,
            max_length=MAX_BREAKERS,
            description="Texts that no repetition goes past.",
            examples=[list(DRY_BREAKERS)],
        ),
        AfterValidator(lambda texts: texts if texts is None else _few_characters(texts)),
    ] = None
    mirostat: Annotated[
        None,
        BeforeValidator(
            refused(
                "Its state depends on probabilities of earlier tokens, which are lost when "
                "another worker continues the answer; use min_p, typical_p or top_n_sigma",
                but=(0, 0.0, False),
            )
        ),
    ] = None
    mirostat_tau: Hint = None
    mirostat_eta: Hint = None
    dynatemp_range: Annotated[
        None,
        BeforeValidator(refused("Use a fixed temperature, with min_p or typical_p", but=(0, 0.0))),
    ] = None
    dynatemp_exponent: Hint = None
    min_keep: Annotated[
        None, BeforeValidator(refused("Filters keep one token at least", but=(0, 1)))
    ] = None
    samplers: Annotated[
        None,
        BeforeValidator(
            refused("The order is fixed; leave it out, and set filters to their neutral values")
        ),
    ] = None


def unseeded(fields: SamplingFields) -> bool:
    """True if a request leaves it to the server to draw a seed: by no seed, or -1, as in vLLM and
    llama.cpp."""
    return fields.seed is None or fields.seed == -1


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
    penalty, window = fields.repetition_penalty, fields.repetition_context_size
    last = fields.repeat_last_n
    if fields.repeat_penalty is not None:
        if penalty not in (None, fields.repeat_penalty):
            raise InvalidRequest(
                "repeat_penalty and repetition_penalty differ; send one of them.",
                param="repeat_penalty",
            )
        if penalty is None and last is None and window is None:
            window = LLAMA_CPP_WINDOW
        penalty = fields.repeat_penalty
        unnamed = tuple(name for name in unnamed if name != "repetition_penalty")
    return Sampling(
        seed=secrets.randbits(63) if unseeded(fields) else (fields.seed or 0) % 2**64,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k if 0 < top_k <= MAX_COUNT else 0,
        min_p=fields.min_p or 0.0,
        repetition_penalty=penalty or 1.0,
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        logit_bias=tuple((int(key), bias) for key, bias in (fields.logit_bias or {}).items()),
        unnamed=unnamed,
        typical_p=1.0 if fields.typical_p is None else fields.typical_p,
        top_n_sigma=max(0.0, fields.top_n_sigma or 0.0),
        xtc_probability=fields.xtc_probability or 0.0,
        xtc_threshold=0.1 if fields.xtc_threshold is None else fields.xtc_threshold,
        repetition_window=_window(window, last),
        presence_window=_window(fields.presence_context_size, last),
        frequency_window=_window(fields.frequency_context_size, last),
        dry=_dry(fields),
    )


def _window(own: int | None, last: int | None) -> int | None:
    """The number of tokens that a penalty counts: its own, or that of all penalties, where -1
    stands for all tokens. None if the request names none."""
    size = last if own is None else own
    return MAX_COUNT if size == -1 else None if size is None else min(size, MAX_COUNT)


def _dry(fields: SamplingFields) -> Dry | None:
    if not fields.dry_multiplier or fields.dry_penalty_last_n == 0:
        return None
    allowed = fields.dry_allowed_length
    return Dry(
        multiplier=fields.dry_multiplier,
        base=1.75 if fields.dry_base is None else fields.dry_base,
        allowed_length=2 if allowed is None else allowed,
        window=_window(fields.dry_penalty_last_n, -1),
        breakers=tuple(fields.dry_sequence_breakers or DRY_BREAKERS),
    )
