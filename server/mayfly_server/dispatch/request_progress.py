"""What a client was given of a request so far, whoever generated it.

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

A machine without clock or connection: it says what to submit, is told what arrived, and says what
is new to the client. Each token id passes it exactly once, whatever becomes of the workers. All
that a delta carries belongs to its ids or to its choice's end: a prompt's echo to the first of
them.
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
from mayfly_server.dispatch.link import Lost, Message
from mayfly_server.dispatch.quarantine import Point, Record
from mayfly_server.errors import InvalidRequest, RequestFailed


@dataclass(frozen=True, slots=True)
class Again:
    """This attempt is over and the request is not. ``full``: the worker may take it later;
    ``stays``: the worker goes on. ``struck`` says whether the request was in the forward pass that
    the worker failed in: None where only the worker's reaper can know."""

    cause: str
    full: bool = False
    retry_after_s: float | None = None
    stays: bool = False
    struck: bool | None = False


@dataclass(frozen=True, slots=True)
class Ended:
    """Every choice has ended."""

    usage: Usage


@dataclass(slots=True)
class _Choice:
    ids: list[int] = field(default_factory=list)
    ended: bool = False

    def take(self, delta: Delta) -> None:
        self.ids += delta.ids
        self.ended = delta.finish is not None


class Attempted:
    """``accepted`` is the first worker's acceptance; ``started`` says whether the present worker
    has begun with the request; ``losses`` counts workers that left it in the lurch; ``record`` is
    what it has seen of their deaths."""

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
        return all(choice.ended for choice in self._choices)

    def submit(self) -> Submit:
        """The next attempt: the whole request at first, later what is missing of it."""
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

    def died(self, kind: str) -> None:
        """The last attempt's worker died, or threw its batch away, in a forward pass with this
        request in it."""
        self.record = self.record.after(kind, self._point, flagged=self._flagged)

    def receive(self, message: Message) -> Delta | Progress | Again | Ended | None:
        """What a message about the present attempt means; None where it means nothing new.

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
                struck = message.suspect or message.marked
                return self._lost(message.cause, stays=message.stays, struck=struck)
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
                return self._lost("lost", struck=None if message.reached else False)

    def stalled(self) -> Again | Ended:
        """The worker has been silent about the request for too long."""
        return self._lost("stalled")

    def _grammar_failed(self, why: str) -> InvalidRequest:
        """The format that the client asked for is more than can be followed, as showed only while
        it was."""
        asked = self._generation.output.constraint
        return InvalidRequest(
            f"The output cannot follow this to its end: {why}.",
            param=asked.param if asked else "tools",
            code="format_too_complex",
        )

    def _delta(self, delta: Delta) -> Delta | Again | Ended:
        if self.accepted is None or not 0 <= delta.choice < len(self._choices):
            return self._lost("out of turn")
        choice = self._choices[delta.choice]
        if choice.ended or delta.index != len(choice.ids):
            return self._lost("gap")
        self.started = True
        choice.take(delta)
        return delta

    def _rejected(self, rejected: Rejected) -> Again:
        match rejected.reason:
            case "invalid":
                raise InvalidRequest(rejected.message, param=rejected.param, code=rejected.code)
            case "full":
                return Again("full", full=True, retry_after_s=rejected.retry_after_s)
            case "leaving":
                return Again("leaving")

    def _lost(
        self, cause: str, *, stays: bool = False, struck: bool | None = False
    ) -> Again | Ended:
        if self.complete:
            return Ended(self._usage(Usage()))
        if cause != "drain":
            self.losses += 1
        return Again(cause, stays=stays, struck=struck)

    @property
    def _point(self) -> Point:
        return tuple(len(choice.ids) for choice in self._choices)

    def _usage(self, last: Usage) -> Usage:
        """Tokens are counted here, where they passed; what only a worker can know is taken from
        the last one."""
        prompt = self.accepted.prompt_tokens if self.accepted else 0
        completion = sum(len(choice.ids) for choice in self._choices)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            cached_tokens=min(last.cached_tokens, prompt),
            reasoning_tokens=min(last.reasoning_tokens, completion),
        )
