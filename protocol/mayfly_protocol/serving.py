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
for :data:`mayfly_protocol.settings.PEER_TIMEOUT_S` is gone, and its requests are cancelled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from mayfly_protocol.requests import FinishReason, Generation, Prompt

PING_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class Submit:
    """Run a request, or go on with one that another worker lost.

    ``resume`` holds, for each choice, the token ids that the client was already given: the worker
    replays them without emitting and goes on after them. Empty on a first attempt. A choice that
    had already ended is named in ``finished`` and is not run again. ``suspect`` flags a request
    that may be what workers die of: a worker runs one such at a time, until it has drawn a few
    tokens.
    """

    rid: str
    attempt: int
    generation: Generation
    resume: tuple[tuple[int, ...], ...] = ()
    finished: tuple[int, ...] = ()
    suspect: bool = False


@dataclass(frozen=True, slots=True)
class Cancel:
    """The client is gone, or the request's deadline has passed."""

    rid: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Tokenize:
    """Which tokens is a prompt made of? Nothing is run. ``special`` says whether raw text gets the
    tokenizer's own special tokens; ``count_only`` asks for their number alone."""

    rid: str
    attempt: int
    prompt: Prompt
    special: bool = True
    count_only: bool = False


@dataclass(frozen=True, slots=True)
class Detokenize:
    """Which text do token ids make?"""

    rid: str
    attempt: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ping:
    """Tells the worker that this front end lives, and asks whether the worker's I/O thread does."""

    token: int


@dataclass(frozen=True, slots=True)
class Pong:
    token: int


@dataclass(frozen=True, slots=True)
class Accepted:
    """The prompt was rendered and fits; ``prompt_tokens`` is its length."""

    rid: str
    attempt: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Rejected:
    """Not run. ``invalid``: the request can never run (a 400 with ``message``, ``param`` and
    ``code``); ``full``: try later (``retry_after_s``); ``leaving``: this worker admits nothing
    any more, another one may."""

    rid: str
    attempt: int
    reason: Literal["invalid", "full", "leaving"]
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Tokenized:
    """``ids`` is empty where only their number was asked for."""

    rid: str
    attempt: int
    count: int
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Detokenized:
    rid: str
    attempt: int
    text: str


@dataclass(frozen=True, slots=True)
class Progress:
    """Prompt tokens prefilled so far, of all that need it (cached ones count as done)."""

    rid: str
    attempt: int
    prefilled: int
    total: int


@dataclass(frozen=True, slots=True)
class TopLogprob:
    id: int
    text: str
    raw: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and its alternatives. ``text`` may hold U+FFFD where ``raw``, the token's bytes,
    are no whole character. ``logprob`` is the natural logarithm of the model's own probability,
    before temperature, filters and penalties; None for a prompt's first token."""

    id: int
    text: str
    raw: bytes
    logprob: float | None
    top: tuple[TopLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a tool call: ``id`` and ``name`` on the first piece of each ``index`` only."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """What one choice gained in a step.

    ``index`` is the position of the first of ``ids`` in the choice's output: a gap or a repeat
    means that this worker is lost to the request. Text may lag behind ids (half a character, a
    possible stop string, an open tool call). ``finish`` ends the choice, and ``stop`` is the stop
    string that did it, if one did.
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
    """All that one step produced for one front end."""

    deltas: tuple[Delta, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Finish:
    """Every choice has ended (``done``), or the request was cancelled."""

    rid: str
    attempt: int
    reason: Literal["done", "cancelled"]
    usage: Usage = field(default_factory=Usage)


@dataclass(frozen=True, slots=True)
class Failed:
    """This request met a fault of its own; the worker goes on and another attempt would fail
    likewise. ``kind`` names the fault."""

    rid: str
    attempt: int
    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Handover:
    """The worker gives the request back unfinished: continue it elsewhere, or here where the
    worker ``stays``. ``cause`` is ``drain`` or the kind of the fault. ``suspect`` says that the
    request was in the forward pass that failed and new in it, ``marked`` that it was in it too."""

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
