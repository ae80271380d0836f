"""Messages between a front end and one worker process.

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

``rid`` is a request's id; ``attempt`` counts the tries of the request on workers. A star marks a
terminal message: exactly one of them ends each (rid, attempt). ``Cancel`` is answered by
``Finish(reason="cancelled")``. A front end that sends nothing, not even a ``Ping``, for ten seconds
(:data:`mayfly_protocol.settings.PEER_TIMEOUT_S`) counts as gone, and the worker cancels its
requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from mayfly_protocol.requests import FinishReason, Generation, Prompt

PING_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class Submit:
    """Order to run a request, or to continue a request that another worker lost.

    ``attempt`` counts the tries of the request on workers. ``resume`` holds, for each choice, the
    token ids that the client already has: the worker replays these tokens without sending them and
    goes on after them; ``resume`` is empty on a first attempt. Choices in ``finished`` have ended
    and are not run again. ``suspect`` marks a request that may have ended workers: a worker runs
    one suspect at a time, in forward passes without other requests, and the next one once it has
    sampled a few tokens of the first.
    """

    rid: str
    attempt: int
    generation: Generation
    resume: tuple[tuple[int, ...], ...] = ()
    finished: tuple[int, ...] = ()
    suspect: bool = False


@dataclass(frozen=True, slots=True)
class Cancel:
    """Order to end a request whose client is gone or whose deadline has passed."""

    rid: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Tokenize:
    """Question for the tokens of a prompt, which is not run. ``special`` adds the tokenizer's own
    special tokens to raw text; ``count_only`` asks for the number of tokens alone."""

    rid: str
    attempt: int
    prompt: Prompt
    special: bool = True
    count_only: bool = False


@dataclass(frozen=True, slots=True)
class Detokenize:
    """Question for the text of a list of token ids."""

    rid: str
    attempt: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ping:
    """Sign of life of a front end, which a worker's I/O thread answers with a ``Pong``."""

    token: int


@dataclass(frozen=True, slots=True)
class Pong:
    """Answer of a worker to the ``Ping`` with the same ``token``: a sign of life of its I/O
    thread."""

    token: int


@dataclass(frozen=True, slots=True)
class Accepted:
    """Answer that the worker has rendered the request's prompt and that the prompt fits into the
    context; ``prompt_tokens`` is the prompt's length. ``prompt_ids`` are the prompt's tokens if the
    request asked for them."""

    rid: str
    attempt: int
    prompt_tokens: int
    prompt_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Rejected:
    """Answer that the worker does not run the request. ``invalid``: the request can never run (HTTP
    400 with ``message``, ``param`` and ``code``, and for a prompt that is too long the numbers of
    the prompt's and the context's tokens); ``full``: the worker has no room, try again after
    ``retry_after_s``; ``leaving``: this worker admits nothing any more, but another worker may."""

    rid: str
    attempt: int
    reason: Literal["invalid", "full", "leaving"]
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None
    prompt_tokens: int | None = None
    context: int | None = None


@dataclass(frozen=True, slots=True)
class Tokenized:
    """Answer to ``Tokenize``: the tokens of a prompt; ``ids`` is empty if only the number of tokens
    was asked for."""

    rid: str
    attempt: int
    count: int
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Detokenized:
    """Answer to ``Detokenize``: the text of the token ids."""

    rid: str
    attempt: int
    text: str


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a long prefill: ``prefilled`` of ``total`` prompt tokens; tokens found in the
    prefix cache count as prefilled."""

    rid: str
    attempt: int
    prefilled: int
    total: int


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """A token that the model could have chosen instead of another, with its bytes (``raw``) and the
    natural logarithm of its probability."""

    id: int
    text: str
    raw: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token with its log probability and its likeliest alternatives (``top``). ``raw`` are the
    token's bytes; ``text`` holds U+FFFD for bytes that are no whole character. ``logprob`` is the
    natural logarithm of the model's own probability, before temperature, filters and penalties;
    None for the first token of a prompt. ``rank`` is 1 for the likeliest token, and counted for the
    tokens of a prompt only."""

    id: int
    text: str
    raw: bytes
    logprob: float | None
    top: tuple[TopLogprob, ...] = ()
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of the tool call that is number ``index`` among the calls of its choice; ``id`` and
    ``name`` come with the call's first piece.

    The arguments of all pieces together are a JSON object, unless the last piece says that the call
    is ``unfinished``: an unfinished call was cut off or cannot be read, its arguments lack at least
    their closing brace, and it must not be made; no other call of the choice follows it.
    """

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None
    unfinished: bool = False


@dataclass(frozen=True, slots=True)
class Delta:
    """Output that one choice of a request gained in one step.

    ``index`` is the position of the first of ``ids`` in the choice's output: if positions are
    missing or repeated, the front end counts this worker as lost. ``text`` may lag behind ``ids``
    (half a character, a possible stop string, an open tool call). ``finish`` ends the choice, and
    ``stop`` is the stop string that ended it, if any. ``prompt_logprobs`` come with the first delta
    of a choice, if the request asked for them.
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
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Tokens:
    """Output of one engine step for all requests of one front end."""

    deltas: tuple[Delta, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """Numbers of tokens in a request's prompt and answers."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Finish:
    """Message that the request has ended: all its choices have finished (``done``), or the front
    end cancelled the request (``cancelled``)."""

    rid: str
    attempt: int
    reason: Literal["done", "cancelled"]
    usage: Usage = field(default_factory=Usage)


@dataclass(frozen=True, slots=True)
class Failed:
    """Message that the request failed by a fault of its own: the worker goes on, and the request
    would fail again if it were tried again. ``kind`` names the kind of fault."""

    rid: str
    attempt: int
    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Handover:
    """Message with which a worker gives a request back unfinished, for the front end to continue it
    on another worker, or on the same worker if ``stays``. ``cause`` is ``drain`` or the kind of
    fault. ``suspect`` is True if the request was new in the forward pass that failed, ``marked`` if
    it was in that pass but had run for a while."""

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
