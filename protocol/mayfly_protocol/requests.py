"""A client's request to a model, as it travels from a front end to a worker.

The front end has validated all that can be validated without the tokenizer; the worker validates
the rest (token ids, context length, grammars) before it accepts the request.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

FinishReason = Literal["stop", "length", "tool_calls"]
ToolChoice = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, rendered by the model's own chat template on the worker.

    ``messages`` are OpenAI message objects with ``content`` already joined into one string (or
    None) and ``tool_calls`` arguments already parsed into objects. ``tools`` are OpenAI tool
    objects. ``date`` is the front end's day (``YYYY-MM-DD``), given to templates that ask for the
    date, so that another worker that continues the request renders the same prompt.
    """

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: ToolChoice = "auto"
    forced_tool: str | None = None
    parallel_tool_calls: bool = True
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    date: str = ""
    kind: Literal["chat"] = "chat"


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Raw text as a prompt; with ``special``, with the tokenizer's own special tokens (BOS)."""

    text: str
    kind: Literal["text"] = "text"
    special: bool = True


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids as a prompt, used as they are."""

    ids: tuple[int, ...]
    kind: Literal["tokens"] = "tokens"


Prompt = Annotated[ChatPrompt | TextPrompt | TokenPrompt, Field(discriminator="kind")]


@dataclass(frozen=True, slots=True)
class Dry:
    """Penalty for repetitions ("don't repeat yourself"): a token that would extend a repetition of
    ``length`` tokens loses ``multiplier * base ** (length - allowed_length)``, if the repetition
    has at least ``allowed_length`` tokens. Repetitions are searched for in the last ``window``
    tokens, prompt and output (None: in all), and do not go past a text of ``breakers``.
    """

    multiplier: float
    base: float = 1.75
    allowed_length: int = 2
    window: int | None = None
    breakers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of a request.

    ``seed`` is always set: the front end draws a seed if the client gave none, so that another
    worker that continues the request samples the same tokens. ``temperature`` 0 is greedy sampling.
    ``top_k`` 0, ``top_p`` 1, ``min_p`` 0, ``typical_p`` 1, ``top_n_sigma`` 0 and
    ``xtc_probability`` 0 turn these filters off. Penalties depend on the output only, never on the
    prompt; one with a window (a number of tokens) depends on the last tokens of prompt and output
    instead. ``logit_bias`` pairs a token id with a number that is added to its logit.
    ``allowed_ids``, unless empty, are the only ids that may be sampled; ``bad_words`` are texts
    that may not be generated. ``unnamed`` are the names of the parameters that the client left to
    the server: the worker gives these the values that the model's authors recommend.
    """

    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    unnamed: tuple[str, ...] = ()
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repetition_window: int | None = None
    presence_window: int | None = None
    frequency_window: int | None = None
    dry: Dry | None = None
    bad_words: tuple[str, ...] = ()
    allowed_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Ending:
    """Conditions that end an answer. ``max_tokens`` None allows all that is left of the context."""

    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar that the output must follow.

    ``value`` is the JSON schema (``json_schema``, ``json_object``: as JSON text), the regular
    expression, the Lark grammar, or the choices as a JSON array of strings. ``param`` is the field
    of the client's request that set the constraint, for use in error messages.
    """

    kind: Literal["json_object", "json_schema", "regex", "choice", "grammar"]
    value: str = ""
    param: str = "response_format"


@dataclass(frozen=True, slots=True)
class Output:
    """Form of the answer.

    ``logprobs`` is None if the client asked for none, otherwise the number of alternatives for each
    token (0: only the chosen token), ``prompt_logprobs`` is the same for the tokens of the prompt.
    ``echo`` sends the prompt back as the beginning of the text. With ``split``, reasoning blocks
    and tool calls are taken out of the text (chat); without ``split`` the text is sent unchanged
    (completions). With ``early_calls``, tool calls are sent in pieces as they are generated,
    otherwise each as a whole. ``special_tokens`` keeps special tokens in the text, but not those
    that separate reasoning and tool calls if the text is split. ``prompt_ids`` asks for the
    prompt's token ids.
    """

    logprobs: int | None = None
    echo: bool = False
    split: bool = False
    constraint: Constraint | None = None
    early_calls: bool = False
    special_tokens: bool = False
    prompt_ids: bool = False
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """One prompt with all its parameters: the part of the message ``Submit`` that stays equal when
    the request is tried again on another worker. ``prompt_limit`` is the number of the prompt's
    last tokens that are kept; -1 keeps as many as leave room for the answer in the context."""

    model: str
    prompt: Prompt
    sampling: Sampling
    ending: Ending = field(default_factory=Ending)
    output: Output = field(default_factory=Output)
    n: int = 1
    prompt_limit: int | None = None
