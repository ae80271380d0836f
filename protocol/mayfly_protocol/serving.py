"""Messages between a front end and one incarnation of a worker.

::

    front end                                   worker
    Submit(rid, attempt) ---------------------->
                         <---------------------- Accepted | Rejected*
                         <---------------------- Progress ...           (long prefill)
                         <---------------------- Tokens(deltas) ...     (a message a step)
    Cancel(rid, attempt) ---------------------->
                         <---------------------- Finish* | Failed* | Handover*
    Tokenize, Detokenize ---------------------->
                         <---------------------- Tokenized*, Detokenized* | Rejected*
    Ping                 ---------------------->
                         <---------------------- Pong

A star marks a terminal message: exactly one of them ends each (rid, attempt). ``Cancel`` is
answered by ``Finish(reason="cancelled")``. A front end that sends nothing, not even a ``Ping``,
for :data:`mayfly_protocol.settings.PEER_TIMEOUT_S` counts as gone, and its requests
are cancelled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from mayfly_protocol.requests import FinishReason, Generation, Prompt

PING_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class Submit:
    """Order to run a request, or to continue one that another worker lost.

    ``resume`` holds, for each choice, the token ids that the client already has: the worker replays
    them without sending them and goes on after them. It is empty on a first attempt. Choices in
    ``finished`` have ended and are not run again. ``suspect`` marks a request that may have ended
    workers: a worker runs one of these at a time, until it has sampled a few tokens.
    """

    rid: str
    attempt: int
    generation: Generation
    resume: tuple[tuple[int, ...], ...] = ()
    finished: tuple[int, ...] = ()
    suspect: bool = False


@dataclass(frozen=True, slots=True)
class Cancel:
    """Order to end a request: its client is gone, or its deadline has passed."""

    rid: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Tokenize:
    """Question for the tokens of a prompt; nothing is run. ``special`` adds the tokenizer's own
    special tokens to raw text; ``count_only`` asks for the number of tokens alone."""

    rid: str
    attempt: int
    prompt: Prompt
    special: bool = True
    count_only: bool = False


@dataclass(frozen=True, slots=True)
class Detokenize:
    """Question for the text of token ids."""

    rid: str
    attempt: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ping:
    """Sign of life of a front end, which asks for one of the worker's I/O thread (``Pong``)."""

    token: int


@dataclass(frozen=True, slots=True)
class Pong:
    """Answer to the ``Ping`` with the same token."""

    token: int


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request's prompt was rendered and fits; ``prompt_tokens`` is its length."""

    rid: str
    attempt: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Rejected:
    """The request is not run. ``invalid``: it can never run (a 400 with ``message``, ``param`` and
    ``code``); ``full``: try later (``retry_after_s``); ``leaving``: this worker admits nothing any
    more, another one may."""

    rid: str
    attempt: int
    reason: Literal["invalid", "full", "leaving"]
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Tokenized:
    """The tokens of a prompt; ``ids`` is empty if only their number was asked for."""

    rid: str
    attempt: int
    count: int
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Detokenized:
    """The text of token ids."""

    rid: str
    attempt: int
    text: str


@dataclass(frozen=True, slots=True)
class Progress:
    """Prompt tokens prefilled so far, of ``total``; cached ones count as prefilled."""

    rid: str
    attempt: int
    prefilled: int
    total: int


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """An alternative to a token; the fields are as in ``TokenLogprob``."""

    id: int
    text: str
    raw: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and its alternatives. ``text`` holds U+FFFD for bytes of ``raw``, the token's bytes,
    that are no whole character. ``logprob`` is the natural logarithm of the model's own
    probability, before temperature, filters and penalties; None for a prompt's first token."""

    id: int
    text: str
    raw: bytes
    logprob: float | None
    top: tuple[TopLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a tool call; ``id`` and ``name`` come with the first piece of each ``index``."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """Output that one choice gained in a step.

    ``index`` is the position of the first of ``ids`` in the choice's output: after a gap or a
    repetition the front end takes this worker for lost. Text may lag behind ids (half a character,
    a possible stop string, an open tool call). ``finish`` ends the choice, and ``stop`` is the stop
    string that ended it, if one did.
    """

    rid: str
    attempt: int
    choice: int
    index: int
    ids: tuple[int, ...] = ()
    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class Tokens:
    """Output of one step for one front end."""

    deltas: tuple[Delta, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Finish:
    """The request has ended: every choice has (``done``), or it was cancelled."""

    rid: str
    attempt: int
    reason: Literal["done", "cancelled"]
    usage: Usage = field(default_factory=Usage)


@dataclass(frozen=True, slots=True)
class Failed:
    """The request failed by a fault of its own; the worker goes on, and another attempt would fail,
    too. ``kind`` names the fault."""

    rid: str
    attempt: int
    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Handover:
    """The worker gives the request back unfinished, to be continued on another worker, or on this
    one if it ``stays``. ``cause`` is ``drain`` or the kind of the fault. ``suspect`` says that the
    request was new in the forward pass that failed, ``marked`` that it was in it without being
    new."""

    rid: str
    attempt: int
    cause: str
    suspect: bool = False
    marked: bool = False
    stays: bool = False


Inquiry = Tokenize | Detokenize
ToWorker = Submit | Cancel | Inquiry | Ping
ToFrontEnd = (
    Accepted
    | Rejected
    | Tokenized
    | Detokenized
    | Progress
    | Tokens
    | Finish
    | Failed
    | Handover
    | Pong
)
