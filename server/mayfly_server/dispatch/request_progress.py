"""The progress of a request: the tokens that its client got so far, from one worker or several.

::

              submit            Accepted                  Finish; or lost after
    idle ---------------> sent ----------> running ------ the last choice's end --> ended
      ^                    |                  |
      |   Rejected: full,  |                  |  Handover, lost, a gap, a repeat,
      |   leaving; lost    |                  |  Finish before all choices ended
      +--------------------+------------------+
                           |                  |
                           +--- Rejected: ----+--- Failed: an error, and no further attempt
                                invalid

The class :class:`RequestProgress` is a state machine without clock or connection: it makes the
messages that submit the request, takes the workers' messages, and returns what is new to the
client. Each generated token is passed on exactly once, even if workers are lost. All content of a
delta belongs to its token ids or to the end of its choice; an echo of the prompt and its
log-probabilities belong to the first id. A worker of an older version, which sends no
log-probabilities of prompts, counts as lost if the request asked for them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mayfly_protocol.requests import Generation
from mayfly_protocol.serving import (
    Accepted,
    Delta,
    Detokenized,
    Failed,
    Finish,
    Handover,
    Progress,
    Rejected,
    Submit,
    Tokenized,
    Usage,
)
from mayfly_server.dispatch.mailbox import Lost, Message
from mayfly_server.dispatch.quarantine import Point, Record
from mayfly_server.errors import ContextExceeded, InvalidRequest, RequestFailed


@dataclass(frozen=True, slots=True)
class Retry:
    """The end of an attempt (one try of a request on one worker) that does not end the request.

    Attributes:
        cause: the reason, for logs and metrics.
        worker_full: the worker's queue is full; the worker may take the request later.
        retry_after_s: seconds after which the full worker wants to be asked again, if it said so.
        worker_stays: the worker keeps on serving, so the request may go to it again.
        in_failed_pass: True if the request was in the forward pass in which the worker failed;
            None if only the worker's node can tell, whose verdict :meth:`RequestProgress.not_named`
            or :meth:`RequestProgress.worker_died` takes.
    """

    cause: str
    worker_full: bool = False
    retry_after_s: float | None = None
    worker_stays: bool = False
    in_failed_pass: bool | None = False


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a request: every choice has ended. ``usage`` counts the tokens that all workers
    generated for it."""

    usage: Usage


@dataclass(slots=True)
class _Choice:
    """The token ids of one choice of a request so far."""

    ids: list[int] = field(default_factory=list)
    calls: int = 0
    ended: bool = False

    def repeats(self, delta: Delta) -> bool:
        """True if a delta begins a tool call that an earlier worker has begun already: a worker of
        an older version sends calls as a whole, and cannot go on in the middle of one."""
        return any(
            piece.name is not None and piece.index < self.calls for piece in delta.tool_calls
        )

    def take(self, delta: Delta) -> None:
        self.ids += delta.ids
        self.calls += sum(piece.name is not None for piece in delta.tool_calls)
        self.ended = delta.finish is not None


class RequestProgress:
    """The progress of one request over its attempts, each of which is a try on one worker: the
    tokens and the end of each choice.

    Attributes:
        attempt: the number of the present attempt, from 1 on.
        losses: the number of workers, since the request's last new token, that failed with the
            request, or in an unknown way. It leaves out workers that failed in a forward pass
            without the request.
        moves: the number of workers, since the request's last new token, that did not end the
            request although they should have, for whatever reason.
        record: the deaths of workers that had the request in their last forward pass.
        started: True if the present worker has begun the request's prefill or decoding.
        accepted: the message by which the first worker accepted the request; None before.
    """

    def __init__(self, rid: str, generation: Generation) -> None:
        self.rid = rid
        self.attempt = 0
        self.losses = 0
        self.moves = 0
        self.record = Record()
        self.started = False
        self.accepted: Accepted | None = None
        self._flagged = False
        self._generation = generation
        self._choices = [_Choice() for _ in range(generation.n)]

    @property
    def _scores_asked(self) -> bool:
        return self._generation.output.prompt_logprobs is not None

    @property
    def complete(self) -> bool:
        """True once every choice has ended."""
        return all(choice.ended for choice in self._choices)

    def submit(self) -> Submit:
        """Begins the next attempt (try on a worker). Returns the message for the worker: the
        request, with the tokens that earlier workers generated."""
        self.attempt += 1
        self.started = False
        self._flagged = self.record.suspect(self._point)
        begun = any(choice.ids or choice.ended for choice in self._choices)
        return Submit(
            rid=self.rid,
            attempt=self.attempt,
            generation=self._generation,
            resume=tuple(tuple(choice.ids) for choice in self._choices) if begun else (),
            finished=tuple(i for i, choice in enumerate(self._choices) if choice.ended),
            suspect=self._flagged,
        )

    def not_named(self) -> None:
        """Takes the verdict on a lost worker that names other requests, or none: the request was
        not in the forward pass in which the worker failed, or cannot have caused the failure."""
        self.losses -= 1

    def worker_died(self, kind: str) -> None:
        """Records that the worker which ran the request last died, or lost its batch, by this kind
        of fault in a forward pass that the request was in."""
        self.record = self.record.after(kind, self._point, flagged=self._flagged)

    def receive(self, message: Message) -> Delta | Progress | Retry | Ended | None:
        """Takes the worker's next message about the request. Returns what is new: generated tokens,
        progress, or the end of this try or of the request; None if the worker has accepted.

        Raises:
            InvalidRequest: the worker says that the request can never run, or not to its end.
            RequestFailed: the request itself makes the model fail, and would do so again.
        """
        match message:
            case Delta():
                return self._delta(message)
            case Progress():
                self.started = True
                return message
            case Accepted():
                self.accepted = self.accepted or message
                return None
            case Finish(reason="done") if self.complete:
                return Ended(self._usage(message.usage))
            case Finish():
                return self._lost("cancelled" if message.reason == "cancelled" else "cut short")
            case Handover():
                in_failed_pass = message.suspect or message.marked
                over = self._lost(
                    message.cause, worker_stays=message.stays, in_failed_pass=in_failed_pass
                )
                if isinstance(over, Retry) and message.cause != "drain" and not in_failed_pass:
                    self.not_named()
                return over
            case Rejected():
                return self._rejected(message)
            case Failed(kind="grammar"):
                raise self._grammar_failed(message.message)
            case Failed():
                raise RequestFailed(
                    f"The model failed on this request ({message.kind}) and would fail again.",
                    code=message.kind,
                    cause=message.message,
                )
            case Tokenized() | Detokenized():
                return self._lost("out of turn")
            case Lost():
                return self._lost("lost", in_failed_pass=None if message.reached else False)

    def stalled(self) -> Retry | Ended:
        """Ends the request's present try on a worker, because the worker has sent nothing about the
        request for too long."""
        return self._lost("stalled")

    def _grammar_failed(self, why: str) -> InvalidRequest:
        """The error for an output format that turned out, during generation, to be too complex."""
        asked = self._generation.output.constraint
        return InvalidRequest(
            f"The output cannot follow this format to its end: {why}.",
            param=asked.param if asked else "tools",
            code="format_too_complex",
        )

    def _delta(self, delta: Delta) -> Delta | Retry | Ended:
        if self.accepted is None or not 0 <= delta.choice < len(self._choices):
            return self._lost("out of turn")
        choice = self._choices[delta.choice]
        unscored = not (choice.ids or delta.prompt_logprobs) and self._scores_asked
        if choice.ended or unscored or delta.index != len(choice.ids) or choice.repeats(delta):
            return self._lost("gap")
        self.started = True
        if delta.ids:
            self.losses = self.moves = 0
        choice.take(delta)
        return delta

    def _rejected(self, rejected: Rejected) -> Retry:
        match rejected.reason:
            case "invalid" if rejected.prompt_tokens and rejected.context:
                raise ContextExceeded(
                    rejected.prompt_tokens, rejected.context, param=rejected.param
                )
            case "invalid":
                raise InvalidRequest(rejected.message, param=rejected.param, code=rejected.code)
            case "full":
                return Retry("full", worker_full=True, retry_after_s=rejected.retry_after_s)
            case "leaving":
                return Retry("leaving")

    def _lost(
        self, cause: str, *, worker_stays: bool = False, in_failed_pass: bool | None = False
    ) -> Retry | Ended:
        if self.complete:
            return Ended(self._usage(Usage()))
        if cause != "drain":
            self.losses += 1
            self.moves += 1
        return Retry(cause, worker_stays=worker_stays, in_failed_pass=in_failed_pass)

    @property
    def _point(self) -> Point:
        return tuple(len(choice.ids) for choice in self._choices)

    def _usage(self, last: Usage) -> Usage:
        """Counts the request's tokens, whichever workers generated them. The numbers of cached and
        of reasoning tokens are those that the last worker counted."""
        prompt = self.accepted.prompt_tokens if self.accepted else 0
        completion = sum(len(choice.ids) for choice in self._choices)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            cached_tokens=min(last.cached_tokens, prompt),
            reasoning_tokens=min(last.reasoning_tokens, completion),
        )
