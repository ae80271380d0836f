"""What a client asks of a model, as it travels from a front end to a worker.

Everything here is already validated by the front end as far as that is possible without the
tokenizer; the worker validates the rest (token ids, context length, grammars) before it accepts.
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
    objects. ``date`` is the front end's day (``YYYY-MM-DD``): a template that asks for the date
    gets this one, so that a continuation on another worker renders the same prompt.
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
    """Raw text, tokenized with the tokenizer's own special tokens (BOS) added."""

    text: str
    kind: Literal["text"] = "text"


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, taken as they are."""

    ids: tuple[int, ...]
    kind: Literal["tokens"] = "tokens"


Prompt = Annotated[ChatPrompt | TextPrompt | TokenPrompt, Field(discriminator="kind")]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn.

    ``seed`` is always set: the front end draws one where the client gave none, so that a
    continuation elsewhere draws the same tokens. ``temperature`` 0 is greedy. ``top_k`` 0,
    ``top_p`` 1 and ``min_p`` 0 are off. Penalties look at the output only, never at the prompt.
    ``logit_bias`` pairs a token id with what is added to its logit.
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


@dataclass(frozen=True, slots=True)
class Ending:
    """When a choice ends. ``max_tokens`` None means what the context leaves."""

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
    expression, the Lark grammar, or the choices as a JSON array of strings. ``param`` is the
    request's field that asks for it, as errors name it.
    """

    kind: Literal["json_object", "json_schema", "regex", "choice", "grammar"]
    value: str = ""
    param: str = "response_format"


@dataclass(frozen=True, slots=True)
class Output:
    """What comes back beside the text.

    ``logprobs`` is None where they were not asked for, otherwise the number of alternatives a
    token (0: only the chosen one). ``echo`` sends the prompt back as the beginning of the text, and
    does not go together with ``logprobs``. ``split`` turns on the parsing of reasoning blocks and
    tool calls out of the text (chat); without it text comes as it is (completions).
    """

    logprobs: int | None = None
    echo: bool = False
    split: bool = False
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """One prompt and everything asked of it: the part of ``Submit`` that never changes between
    the attempts at a request."""

    model: str
    prompt: Prompt
    sampling: Sampling
    ending: Ending = field(default_factory=Ending)
    output: Output = field(default_factory=Output)
    n: int = 1
