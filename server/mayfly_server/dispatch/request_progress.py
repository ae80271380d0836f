"""The progress of a request: what its client was given so far, whichever workers generated it.

::

              submit            Accepted                  Finish; or lost after
    idle ---------------> sent ----------> running ------ the last choice's end --> ended
      ^                    |                  |
      |   Rejected: full,  |                  |  Handover, lost, a gap, a repeat,
      |   leaving; lost    |                  |  an end that is none
      +--------------------+------------------+
                           |                  |
                           +--- Rejected: ----+--- Failed: an error, and no further attempt
                                invalid

A state machine without clock or connection: it makes the messages to submit, takes the messages
that arrive, and returns what is new to the client. Each token id passes it exactly once, whatever
becomes of the workers. Everything in a delta belongs to its ids or to its choice's end: a prompt's
echo to the first of them.
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
from mayfly_server.errors import InvalidRequest, RequestFailed


@dataclass(frozen=True, slots=True)
class Retry:
    """An attempt is over and the request is not.

    Attributes:
        cause: the reason, for logs and metrics.
        worker_full: the worker's queue is full; the worker may take the request later.
        retry_after_s: in how many seconds, if the worker said so.
        worker_stays: the worker goes on serving.
        in_failed_pass: whether the request was in the forward pass that the worker failed in; None
            where only the worker's reaper can know.
    """

    cause: str
    worker_full: bool = False
    retry_after_s: float | None = None
    worker_stays: bool = False
    in_failed_pass: bool | None = False


@dataclass(frozen=True, slots=True)
class Ended:
    """Every choice has ended."""

    usage: Usage


@dataclass(slots=True)
class _Choice:
    """One choice's token ids so far."""

    ids: list[int] = field(default_factory=list)
    ended: bool = False

    def take(self, delta: Delta) -> None:
        self.ids += delta.ids
        self.ended = delta.finish is not None


class RequestProgress:
    """The tokens and ends of each choice, and the attempts at the request.

    Attributes:
        attempt: the number of the present attempt, from 1 on.
        losses: how many workers failed to end the request.
        record: the deaths of workers while they ran the request.
        started: whether the present worker has begun with the request.
        accepted: the first worker's acceptance.
    """

    def __init__(self, rid: str, generation: Generation) -> None:
        self.rid = rid
        self.attempt = 0
        self.losses = 0
        self.record = Record()
        self.started = False
        self.accepted: Accepted | None = None
        self._flagged = False
        self._generation = generation
        self._choices = [_Choice() for _ in range(generation.n)]

    @property
    def complete(self) -> bool:
        """True once every choice has ended."""
        return all(choice.ended for choice in self._choices)

    def submit(self) -> Submit:
        """Begins the next attempt: with the whole request at first, later with what is missing."""
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

    def worker_died(self, kind: str) -> None:
        """Records that the last attempt's worker died, or threw its batch away, in a forward pass
        with this request in it."""
        self.record = self.record.after(kind, self._point, flagged=self._flagged)

    def receive(self, message: Message) -> Delta | Progress | Retry | Ended | None:
        """Takes a message about the present attempt. Returns what is new to the client or to the
        relay; None after an acceptance.

        Raises:
            InvalidRequest: the worker says that this can never run, or not to its end.
            RequestFailed: the request met a fault of its own.
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
                return self._lost(
                    message.cause, worker_stays=message.stays, in_failed_pass=in_failed_pass
                )
            case Rejected():
                return self._rejected(message)
            case Failed(kind="grammar"):
                raise self._grammar_failed(message.message)
            case Failed():
                raise RequestFailed(
                    f"The model failed on this request ({message.kind}) and would fail again.",
                    code=message.kind,
                )
            case Tokenized() | Detokenized():
                return self._lost("out of turn")
            case Lost():
                return self._lost("lost", in_failed_pass=None if message.reached else False)

    def stalled(self) -> Retry | Ended:
        """Ends the present attempt because its worker has been silent about it for too long."""
        return self._lost("stalled")

    def _grammar_failed(self, why: str) -> InvalidRequest:
        """The error for an output format that turned out, during generation, to be too complex."""
        asked = self._generation.output.constraint
        return InvalidRequest(
            f"The output cannot follow this to its end: {why}.",
            param=asked.param if asked else "tools",
            code="format_too_complex",
        )

    def _delta(self, delta: Delta) -> Delta | Retry | Ended:
        if self.accepted is None or not 0 <= delta.choice < len(self._choices):
            return self._lost("out of turn")
        choice = self._choices[delta.choice]
        if choice.ended or delta.index != len(choice.ids):
            return self._lost("gap")
        self.started = True
        choice.take(delta)
        return delta

    def _rejected(self, rejected: Rejected) -> Retry:
        match rejected.reason:
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
        return Retry(cause, worker_stays=worker_stays, in_failed_pass=in_failed_pass)

    @property
    def _point(self) -> Point:
        return tuple(len(choice.ids) for choice in self._choices)

    def _usage(self, last: Usage) -> Usage:
        """Counts the tokens that passed here. What only a worker can know is taken from the last
        worker's usage."""
        prompt = self.accepted.prompt_tokens if self.accepted else 0
        completion = sum(len(choice.ids) for choice in self._choices)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            cached_tokens=min(last.cached_tokens, prompt),
            reasoning_tokens=min(last.reasoning_tokens, completion),
        )
